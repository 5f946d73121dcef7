"""Which implementation an op picks, by what it is traced for."""

import jax
import jax.numpy as jnp
import pytest
from asked_for import quick

from pallas_kernels import layout
from pallas_kernels.implementations import (
    Taken,
    by_platform,
    call_best,
    if_named,
    in_a_loop,
    lowered_for,
    needs_platform,
    recorded,
    target_platform,
)
from pallas_kernels.move_kv import move_kv
from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.write_kv import write_kv


def calls(head_dim=128):
    """Returns a step's ops by their names."""
    pages = layout.init_pages(4, 16, 2, head_dim, jnp.bfloat16)
    new = jnp.zeros((3, 2, head_dim), jnp.bfloat16)
    slots = jnp.arange(3, dtype=jnp.int32)
    table, starts = jnp.zeros((1, 2), jnp.int32), jnp.array([0, 3], jnp.int32)

    def attend(q):
        lengths = jnp.zeros(1, jnp.int32)
        return tree_attention(q, *pages, table, starts, lengths, scale=1.0, max_tokens_per_row=3)

    return {
        "tree_attention": lambda: attend(new),
        "write_kv": lambda: write_kv(*pages, new, new, slots),
        "move_kv": lambda: move_kv(pages, slots, slots + 1),
    }


def traced(head_dim=128):
    """Returns them as they are traced, one text each."""
    return {name: str(jax.make_jaxpr(call)()) for name, call in calls(head_dim).items()}


def test_ops_traced_for_a_tpu_are_kernels():
    with lowered_for("tpu"):
        for name, text in traced().items():
            assert "pallas_call" in text, name
            assert f"name={name}" in text
    assert not any("pallas_call" in text for text in traced().values())


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_ops_traced_for_another_platform_are_not(platform):
    with lowered_for(platform):
        assert not any("pallas_call" in text for text in traced().values())


def test_what_no_kernel_covers_runs_anywhere():
    with lowered_for("tpu"):
        assert not any("pallas_call" in text for text in traced(head_dim=64).values())


def test_a_platform_holds_within_its_block_alone():
    call = needs_platform("tpu", lambda: "kernel")
    other = {"mosaic_tpu": call, "xla": lambda: "xla"}
    assert call_best("other", other, None) == "xla"
    with lowered_for("tpu"):
        assert call_best("other", other, None) == "kernel"
        with lowered_for("gpu"):
            assert call_best("other", other, None) == "xla"
        assert call_best("other", other, None) == "kernel"
    with pytest.raises(ValueError, match="stop"), lowered_for("tpu"):
        raise ValueError("stop")
    assert call_best("other", other, None) == "xla"


@pytest.mark.parametrize("in_64_bits", quick([False, True], True))
@pytest.mark.parametrize("promotion", quick(["standard", "strict"], "strict"))
def test_kernels_are_lowered_whatever_the_program_counts_in(in_64_bits, promotion):
    numbers = jax.enable_x64(in_64_bits), jax.numpy_dtype_promotion(promotion)
    with numbers[0], numbers[1], lowered_for("tpu"):
        for call in calls().values():
            lowered = jax.jit(call).trace().lower(lowering_platforms=("tpu",))
            assert "tpu_custom_call" in lowered.as_text()


def test_pages_that_a_loop_carries_stay_in_hbm():
    with lowered_for("tpu"):
        for name, call in calls().items():
            text = jax.jit(call).trace().lower(lowering_platforms=("tpu",)).as_text()
            assert "input_memory_space_colors" not in text, name
            with in_a_loop():
                looped = jax.jit(call).trace().lower(lowering_platforms=("tpu",))
            assert "input_memory_space_colors" in looped.as_text(), name


def test_what_was_traced_for_one_platform_is_not_run_for_another():
    step = jax.jit(calls()["tree_attention"])
    step()
    with lowered_for("tpu"):
        assert "pallas_call" in str(step.trace().jaxpr)
    assert "pallas_call" not in str(step.trace().jaxpr)


def test_the_platform_is_that_of_the_default_device():
    assert target_platform() == jax.default_backend()
    with jax.default_device("gpu"):  # by name: it need not be there
        assert target_platform() == "gpu"
    with jax.default_device(jax.devices("cpu")[0]):
        assert target_platform() == "cpu"
        with lowered_for("tpu"):
            assert target_platform() == "tpu"


def test_what_an_op_takes_is_recorded():
    def small():
        raise NotImplementedError("pages of 8 are too small.")

    on_tpu = {"mosaic_tpu": needs_platform("tpu", small), "xla": lambda: "xla"}
    with recorded() as taken:
        call_best("op", on_tpu, None)
        with lowered_for("tpu"):
            call_best("op", on_tpu, None)
            call_best("op", on_tpu, None)
        call_best("other", on_tpu, "xla")
    call_best("op", on_tpu, "xla")  # outside of the block
    refused = "mosaic_tpu: pages of 8 are too small."
    assert taken == [Taken("op", "xla"), Taken("op", "xla", (refused,)), Taken("other", "xla")]


def test_an_op_that_takes_nothing_records_nothing():
    with recorded() as taken, pytest.raises(NotImplementedError, match="covers this"):
        call_best("op", {"mosaic_tpu": needs_platform("tpu", lambda: 1)}, None)
    assert taken == []


def test_a_kernel_that_has_to_be_named_is_no_reason():
    implementations = {"kernel": if_named("kernel", None, lambda: 1), "xla": lambda: 2}
    with recorded() as taken:
        assert call_best("op", implementations, None) == 2
    assert taken == [Taken("op", "xla")]


def test_kernels_that_cover_a_case_have_no_reasons():
    with lowered_for("tpu"), recorded() as taken:
        traced()
    by_op = {one.op: one for one in taken}
    assert by_op["tree_attention"] == Taken("tree_attention", "mosaic_tpu")
    with lowered_for("tpu"), recorded() as taken:
        traced(head_dim=64)
    by_op = {one.op: one for one in taken}
    assert by_op["tree_attention"].implementation == "xla"
    assert "must be a multiple of 128" in by_op["tree_attention"].reasons[0]


def test_one_branch_is_traced_for_a_platform():
    traced = []

    def branch(name):
        return lambda x, y: traced.append(name) or x + y

    call = lambda x: by_platform(x, 1, cpu=branch("cpu"), default=branch("default"))
    for platform in ("cpu", "gpu", "tpu"):
        with lowered_for(platform):
            assert jax.jit(call)(2) == 3  # the platform is part of the key of jit's cache
    assert traced == ["cpu", "default", "default"]
    with lowered_for("gpu", compiler="cpu"):
        assert jax.jit(call)(2) == 3
    assert traced[3:] == ["cpu"]
