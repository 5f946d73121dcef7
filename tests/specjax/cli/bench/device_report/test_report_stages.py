"""What the stages measure: the cases of a platform, differences, rooflines, prompts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.names import IMPLEMENTATIONS
from specjax.cli.bench.device_report import (
    embedded_pair,
    kernel_times,
    model_steps,
    numerics,
    op_runs,
    peaks,
    prefill,
    random_models,
    speed,
    tuning,
)
from specjax.cli.bench.device_report.cases import Context, LeftOut, NotReached
from specjax.cli.bench.device_report.sizes import FULL, SIZES, SMALL, TINY, Pair, size_for
from specjax.cli.bench.device_report.stages import STAGES
from specjax.config.engine import EngineConfig
from specjax.decode.bucket import Bucket
from specjax.planning import device_memory

SPEED = {"copy_bytes_per_s": 4e9, "read_bytes_per_s": 8e9, "flops_per_s": 1e11, "published": None}


@pytest.fixture
def context(tmp_path):
    models = random_models.RandomModels()
    return Context(TINY, tmp_path, jax.devices()[0], models, {"device: speed": SPEED}.get)


def test_stages_share_all_of_the_time():
    assert sum(stage.share for stage in STAGES) == pytest.approx(1)


@pytest.mark.parametrize("size", SIZES.values(), ids=list(SIZES))
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_names_of_cases_are_unique(size, platform):
    for stage in STAGES:
        names = [case.name for case in stage.cases(size, platform)]
        assert names
        assert len(names) == len(set(names))


def test_sizes_by_platform():
    assert size_for("cpu") is SMALL
    assert size_for("tpu") is size_for("gpu") is FULL
    assert [str(pair) for pair in FULL.pairs] == [
        "llama_3_2_1b + ngram",
        "llama_3_1_8b + llama_3_2_1b",
    ]
    assert sorted(FULL.batches) == sorted(FULL.model_batches) == [1, 8, 32, 64]


def test_every_op_is_compared_by_what_its_platform_offers():
    assert set(op_runs.RUNS) == set(IMPLEMENTATIONS)
    by = {
        platform: {tuple(case.name.split(", ")[:2]) for case in numerics.cases(FULL, platform)}
        for platform in ("cpu", "gpu", "tpu")
    }
    xla = {(op, "xla") for op in IMPLEMENTATIONS}
    assert by["cpu"] == xla | {("tree_attention", "mosaic_tpu")}
    assert by["gpu"] == xla | {("tree_attention", "mosaic_gpu")}
    kernels = ("tree_attention", "write_kv", "move_kv", "seeded_sample")
    assert by["tpu"] == xla | {(op, "mosaic_tpu") for op in kernels}


@pytest.mark.parametrize(
    ("found", "expected", "largest", "agrees"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5, True),
        ([1.0, 2.0], [1.0, 2.75], 0.75, False),
        ([np.nan, np.inf], [np.nan, np.inf], 0.0, True),
        ([np.nan, 1.0], [1.0, 1.0], None, False),
        ([1.0, np.inf], [1.0, -np.inf], None, False),
        ([], [], 0.0, True),
    ],
)
def test_differences(found, expected, largest, agrees):
    result = numerics.difference([np.array(found)], [np.array(expected)], 0.5)
    assert result == {"largest_error": largest, "agrees": agrees}


def test_a_relative_tolerance_is_of_the_expected_number():
    far = [np.array([104.0])], [np.array([100.0])]
    assert not numerics.difference(*far, 1.0, 0.02)["agrees"]
    assert numerics.difference(*far, 1.0, 0.04)["agrees"]


def test_a_wrong_kernel_is_noticed(context, monkeypatch):
    assert numerics.compare("write_kv", "xla", "one_token", context)["agrees"]
    right = op_runs.write_kv

    def wrong(k_pages, v_pages, *rest, implementation=None, **options):
        found = right(k_pages, v_pages, *rest, implementation=implementation, **options)
        return found if implementation == "reference" else (found[0] + 1e-6, found[1])

    monkeypatch.setitem(
        op_runs.RUNS,
        "write_kv",
        op_runs.RUNS["write_kv"]._replace(
            both=lambda *case: op_runs._simple(wrong, op_runs.writing, *case)
        ),
    )
    assert not numerics.compare("write_kv", "xla", "one_token", context)["agrees"]


def test_what_no_kernel_covers_is_left_out(context):
    with pytest.raises(LeftOut, match=r"not covered: .*runs on tpu"):
        numerics.compare("move_kv", "mosaic_tpu", "one", context)
    with pytest.raises(LeftOut, match="self-test"):
        numerics.compare("tree_attention", "mosaic_gpu", "decode", context)


def test_a_device_without_published_figures_is_compared_with_what_was_measured(context):
    assert context.peaks == peaks.Peaks(8e9, 1e11, peaks.MEASURED)
    context.result = lambda key: None
    with pytest.raises(NotReached, match="speed of the device was not measured"):
        _ = context.copy_bytes_per_s

    class Chip:
        device_kind, platform = "TPU v5 lite", "tpu"

    context.device = Chip()
    assert context.peaks == peaks.Peaks(819e9, 197e12, peaks.PUBLISHED)


@pytest.mark.parametrize(
    "case",
    [model_steps.cases(TINY, "cpu")[0], prefill.cases(TINY, "cpu")[0]],
    ids=("steps", "prefill"),
)
def test_what_needs_the_speed_of_the_device_does_not_begin_without(context, monkeypatch, case):
    for stage in (model_steps, prefill):
        monkeypatch.setattr(stage, "setup_of", lambda *_: pytest.fail("loaded"))
    context.result = lambda key: None
    with pytest.raises(NotReached, match="not measured"):
        case.run(context)


def test_the_peak_of_products_is_of_the_fastest_round_and_size(monkeypatch):
    def timed(contenders, rounds):
        assert rounds == 3
        assert [contenders[side]().shape for side in contenders] == [(16, 16), (32, 32)]
        return {16: [1.0, 0.5, 1.0], 32: [9.0, 2.0, 9.0]}

    monkeypatch.setattr(speed.measuring, "interleaved", timed)
    assert speed._flops_per_s(16, 3) == speed.NUM_PRODUCTS * 2 * 32**3 / 2.0


def test_block_sizes_are_chosen_on_a_tpu_alone(context):
    (case,) = tuning.cases(FULL, "gpu")
    with pytest.raises(LeftOut, match="this is a GPU"):
        case.run(context)
    assert len(tuning.cases(FULL, "tpu")) == 8


def test_written_tokens_count_as_read_and_written_once(context):
    found = kernel_times.time_writing("xla", TINY.heads[0], 2, context)
    assert found["moved_bytes"] == 2 * 2 * 2 * 2 * 64 * 4  # k and v, in and out, rows, heads
    assert found["of_peak"] == pytest.approx(found["moved_bytes"] / found["seconds"] / 8e9)


def test_tokens_per_second_of_an_assumed_rate(context):
    config = random_models.config_of("tiny")
    works = model_steps.model_work(config, jnp.float32, 1), []
    step = model_steps._step(Bucket(4, 2), 0.01, 64, works, context, drafted=2.0)
    assert step["synthetic_acceptance_tokens_per_s"]["0.6"] == pytest.approx(4 * 1.96 / 0.01)
    assert step["plain_tokens_per_s"] is None
    assert step["of_roofline"] == pytest.approx(step["roofline_s"] / 0.01)
    plain = model_steps._step(Bucket(4, 0), 0.01, 64, works, context, drafted=0.0)
    assert plain["synthetic_acceptance_tokens_per_s"] == {}
    assert plain["plain_tokens_per_s"] == pytest.approx(400)
    less = model_steps._step(Bucket(4, 2), 0.01, 64, works, context, drafted=1.9)
    assert less["synthetic_acceptance_tokens_per_s"] == {}


@pytest.mark.full
def test_timed_steps_draft_k_tokens_in_every_row(context):
    found = model_steps.measure(TINY.pairs[0], 2, context)
    assert TINY.pairs[0].drafter == "ngram"
    assert [step["drafted_per_row"] for step in found["steps"]] == [0.0, 2.0]
    assert found["steps"][1]["synthetic_acceptance_tokens_per_s"]


def test_a_model_that_does_not_fit_is_left_out_with_the_reason(context, monkeypatch):
    monkeypatch.setattr(device_memory, "total_bytes", lambda device: 16 * 10**9)
    # Its weights are not even made.
    monkeypatch.setattr(random_models.RandomModels, "pair", lambda *_: pytest.fail("loaded"))
    pair = FULL.pairs[1]
    random_models.check_fits(FULL.pairs[0], context.device, EngineConfig(max_rows=1))
    for run in (
        lambda: model_steps.measure(pair, 1, context),
        lambda: prefill.measure("llama_3_1_8b", 64, context),
    ):
        with pytest.raises(LeftOut, match=r"does not fit: weights .* of the 16\.00 GB"):
            run()


@pytest.mark.full
def test_weights_that_are_no_longer_asked_for_are_dropped():
    models = random_models.RandomModels()
    tiny, name = models.pair(Pair("tiny", "ngram"))
    assert name == "ngram"
    assert models.pair(Pair("tiny", "none"))[0] is tiny
    models.pair(Pair("bench_60m_draft", "none"))
    assert models.pair(Pair("tiny", "none"))[0] is not tiny


def test_prompts_are_of_different_places():
    prompts = embedded_pair.prompts_of(lambda text: list(text.encode()), 20)
    assert len({tuple(prompt) for prompt in prompts}) == 20
    assert {len(prompt) for prompt in prompts} == {48}


@pytest.mark.full
def test_a_prompt_is_fed_whole_and_again_from_its_begin(context):
    setup = random_models.setup_of(
        context,
        Pair("tiny", "none"),
        EngineConfig(max_rows=1, max_context=162, max_prefill_tokens=64),
        0,
    )
    decoder = setup.decoder(setup.standing_sizes(), [])
    prompt = prefill.Prompt(decoder, setup.params, 160)
    assert prompt.counts == [64, 64, 32]
    for _ in range(2):
        prompt()
        assert prompt.timer.state.cache.lengths.tolist() == [160]
