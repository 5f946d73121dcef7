"""The count of machine code: loops as libtpu writes them, and the bound that follows."""

import pytest

from pallas_kernels.tree_attention.mosaic_tpu import Tiling
from specjax.configs.devices import DEVICES
from tools import kernel_bundles as bundles
from tools.kernel_bundles import CHIPS, Loop, Shape, loops_over_tiles, read_bundles

# A grid step of 14 bundles: 2 around, a loop that only copies, a loop over whole tiles with a loop
# of three bundles within, and a loop with masks. Empty bundles, and those with instructions from
# behind a loop, do not say that they are within.
CODE = """
LB: loop body
= control target key end

     0   :  { %7 = vsyncpa [#allocation3], 0 }
   0x1 LB: > { %s1 = smov 0 }
   0x2 LB: >> { %9 = dma.hbm_to_vmem [thread:$0]  (!%p1), /*hbm=*/%s1,
hlo: tree_attention.1
 */ }
   0x3   : >> { %p2 = scmp.eq.s32.totalorder %s1, 3 }
   0x4 LB: >> { %v1 = vld [vmem:[%s1] sm:$0xff] }
   0x5 LB: >>> { %2 = vmatpush.bf16.xpose.msra.mxu0 %v1 }
   0x6   : >>> { %3 = vmatmul.bf16.vlgmr.msra.gmra.mxu0 %v1  ;;  %4 = vst [vmem:[#a_spill]] %v1 }
   0x7   :  { }
   0x8   : >>> { %4 = vadd.f32 %v1, %v1 }
   0x8 LB: >> { %5 = vmatmul.bf16.vlgmr.msra.gmra.mxu0 %v1 }
   0x9   : >> { %v2 = vld [vmem:[#a_spill]] }
   0xa   : > { %s9 = sld [smem:[#a_spill]] (%p9) }
   0xb   :  { }
   0xb   : >> { %6 = vst [vmem:[%s1] sm:$0xff] %v2 }
   0xc   : > { %s2 = sadd.s32 1, %s1 }
   0xd   :  { %8 = vsyncpa [#allocation3], 1 }
"""


def test_loops_are_counted_with_what_turns_within():
    loops, around = loops_over_tiles(read_bundles(CODE), turns_within=8)
    # The loop within has 4 bundles, the empty one included, and its own loop has 1 more.
    assert loops == [Loop(1 + 8 * 4, 2, 1), Loop(5, 1, 0)]
    assert around == 2
    unrolled, _ = loops_over_tiles(read_bundles(CODE), turns_within=1)
    assert unrolled[0].bundles == 5


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="no line of the text is a bundle"):
        read_bundles("HloModule jit_step\n")


def test_a_bound_is_of_the_rows_own_tiles():
    tiling = Tiling(queries=1, tile_tokens=512, slots=4, few_tokens=128, turns_per_tile=1)
    loops = Loop(1000, 1, 0), Loop(2000, 1, 0), Loop(500, 1, 0)
    shape = Shape("v5e:2x2", kv_heads=2, heads=8, context=2047)
    bytes_of_token = 2 * 2 * 128 * 2
    # New tokens at 2,048 (whole tiles end before them), and at 2,300: 3 whole tiles, 4 with one
    # of few keys, and 4 with one of many.
    for context, expected in ((2047, 4000), (2048, 4500), (2300, 6000)):
        row = Shape("v5e:2x2", kv_heads=2, heads=8, context=context)
        found = bundles._of_loops(row, tiling, *loops, 100)
        pages = -(-(context + 1) // 128) * 128
        of_memory = pages * bytes_of_token / (expected + 100) * 1.5e9 / 819e9
        assert found.of_memory == pytest.approx(of_memory)
    found = bundles._of_loops(shape, tiling, *loops, 100)
    assert found.bytes_per_s == pytest.approx(512 * bytes_of_token / 1000 * 1.5e9)
    assert found.ahead_bytes == 3 * 512 * bytes_of_token
    assert found.of_matrix_unit == pytest.approx(4 * 8 * 128 * 512 / 1000 / 131072)
    # Two cores share the blocks: of a chip, twice as much.
    both = Shape("v5p:2x2x1", kv_heads=2, heads=8, context=2047)
    other = bundles._of_loops(both, tiling, *loops, 100)
    assert other.bytes_per_s == pytest.approx(found.bytes_per_s * 2 * 1.75 / 1.5)


@pytest.mark.parametrize("name", CHIPS)
def test_figures_are_those_that_makers_publish(name):
    chip, published = CHIPS[name], DEVICES[name].per_device()
    assert chip.bytes_per_s == published.bytes_per_s
    flops_per_s = chip.cores * chip.clock_hz * chip.flops_per_cycle
    assert flops_per_s == pytest.approx(published.flops_per_s, rel=0.01)
