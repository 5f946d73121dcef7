"""Writing keys and values, and moving whole pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick

from pallas_kernels import layout
from pallas_kernels.write_kv import write_kv


@pytest.mark.parametrize("implementation", ["xla", "reference", None])
@pytest.mark.parametrize("num_tokens", quick([1, 2, 7, 40], 7))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_writes_are_read_back_and_the_rest_stays(implementation, num_tokens, dtype):
    rng = np.random.default_rng(num_tokens)
    shape = layout.page_shape(8, 16, 2, 64)
    pages = [jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2)]
    num_slots = layout.num_slots(pages[0])
    slots = rng.permutation(num_slots)[:num_tokens].astype(np.int32)
    slots[num_tokens // 2] = num_slots  # dropped
    slots = jnp.asarray(slots)
    new = [jnp.asarray(rng.standard_normal((num_tokens, 2, 64)), dtype) for _ in "kv"]
    write = jax.jit(write_kv, static_argnames="implementation")
    written = write(*pages, *new, slots, implementation=implementation)
    is_kept = np.asarray(slots) < num_slots
    everywhere = jnp.arange(num_slots)
    for before, tokens, after in zip(pages, new, written, strict=True):
        expected = np.array(layout.read_slots(before, everywhere))
        expected[np.asarray(slots)[is_kept]] = np.asarray(tokens)[is_kept]
        np.testing.assert_array_equal(layout.read_slots(after, everywhere), expected)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_slots_that_do_not_exist_are_dropped(implementation):
    rng = np.random.default_rng(0)
    shape = layout.init_pages(2, 8, 1, 8, jnp.float32)[0].shape
    pages = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(2)]
    slots = jnp.array([-1, -17, 16, 17, 1000], jnp.int32)
    new = jnp.ones((5, 1, 8))
    found = write_kv(*pages, new, new, slots, implementation=implementation)
    for before, after in zip(pages, found, strict=True):
        np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "lines"), [(4, 64, 2), (3, 64, 3), (8, 32, 2), (2, 80, 2)]
)
def test_heads_in_lanes_lie_beside_each_other(kv_heads, head_dim, lines):
    pages = layout.init_pages(2, 16, kv_heads, head_dim, jnp.float32, in_lanes=True)
    assert pages[0].shape == (2, lines, 16, 128)
    rng = np.random.default_rng(0)
    new = jnp.asarray(rng.standard_normal((3, kv_heads, head_dim)), jnp.float32)
    slots = jnp.array([17, 32, 0], jnp.int32)
    for after in write_kv(*pages, new, new, slots):
        read = layout.read_slots(after, slots[jnp.array([0, 2])])
        filled = kv_heads // lines * head_dim
        np.testing.assert_array_equal(
            read[..., :filled].reshape(2, kv_heads, head_dim), new[jnp.array([0, 2])]
        )
        assert not read[..., filled:].any()


def test_refusals():
    pages = layout.init_pages(2, 8, 1, 8, jnp.float32)
    new, slots = jnp.ones((3, 1, 8)), jnp.arange(3, dtype=jnp.int32)
    with pytest.raises(ValueError, match="num_tokens, kv_heads, head_dim"):
        write_kv(*pages, new[:, :, :4], new, slots)
    with pytest.raises(ValueError, match="2 key heads of 8 do not lie"):
        write_kv(*pages, *[jnp.ones((3, 2, 8))] * 2, slots)
    with pytest.raises(ValueError, match="int32"):
        write_kv(*pages, new, new, slots.astype(jnp.float32))
    with pytest.raises(ValueError, match="no implementation='cuda'; expected one of"):
        write_kv(*pages, new, new, slots, implementation="cuda")


def test_layout_reads_back_what_it_was_made_with():
    pages, _ = layout.init_pages(5, 16, 2, 64, jnp.bfloat16)
    assert layout.num_pages(pages) == 5
    assert layout.page_size(pages) == 16
    assert layout.kv_heads(pages) == 2
    assert layout.head_dim(pages) == 64
    assert layout.num_slots(pages) == 80


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("in_lanes", [False, True])
def test_quantized_pages_hold_the_nearest_numbers(dtype, in_lanes):
    rng = np.random.default_rng(0)
    pages = layout.init_pages(2, 32, 2, 64, dtype, in_lanes=in_lanes)
    new = 3 * rng.standard_normal((2, 5, 2, 64)).astype(np.float32)
    new[0, 0] *= 1e6  # beyond the largest
    scales = jnp.array([[0.03, 0.5], [1.0, 0.125]]) * 127 / layout.LARGEST[pages[0].dtype]
    slots = jnp.array([3, 40, 33, 64, 0], jnp.int32)
    written = write_kv(*pages, *map(jnp.asarray, new), slots, k_scale=scales[0], v_scale=scales[1])
    every = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype)).astype(np.float32)
    every = every[np.abs(every) <= layout.LARGEST[pages[0].dtype]]  # not NaN either
    for pages, tokens, scale in zip(written, new, scales, strict=True):
        held = np.asarray(layout.read_slots(pages, slots), np.float32).reshape(5, 2, 64)
        for token in (0, 1, 2, 4):  # one is dropped
            wanted = tokens[token] / np.asarray(scale)[:, None]
            distance = np.abs(wanted[..., None] - every).min(axis=-1)
            np.testing.assert_allclose(np.abs(wanted - held[token]), distance, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="need both scales"):
        write_kv(*written, *map(jnp.asarray, new), slots)


@pytest.mark.parametrize("in_lanes", quick([False, True], False))
def test_no_token_changes_nothing(in_lanes):
    pages = layout.init_pages(2, 16, 4, 64, jnp.float32, in_lanes=in_lanes)
    new, slots = jnp.zeros((0, 4, 64)), jnp.zeros(0, jnp.int32)
    for before, after in zip(pages, write_kv(*pages, new, new, slots), strict=True):
        np.testing.assert_array_equal(before, after)
