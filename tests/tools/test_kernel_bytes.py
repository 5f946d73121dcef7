"""Bytes of kernels, by formulas with known answers."""

import pytest

from tools.hlo_program import parse
from tools.kernel_bytes import KernelStep
from tools.program_traffic import Kernel

PAGES = "bf16[64,2,32,128]{3,2,1,0:T(8,128)(2,1)}"
TOKEN = 2 * 2 * 128 * 2  # bytes of a token's keys and values
STEP = dict(rows=3, nodes=5, context=1000)


def kernel(name, *, layer=0, queries="bf16[3,2,16,128]{3,2,1,0:S(1)}", aliases=""):
    """A call with queries, then keys and values of a layer."""
    line = (
        f"  ROOT %k = {'(' + PAGES + ', ' + PAGES + ')' if aliases else queries} "
        f'custom-call(%q, %a, %b), custom_call_target="tpu_custom_call"{aliases}'
    )
    text = f"""ENTRY %m (q: bf16[3]) -> bf16[3] {{
  %q = {queries} parameter(0)
  %a = {PAGES} parameter(1)
  %b = {PAGES} parameter(2)
{line}
}}"""
    at = parse(text).computations["m"].instructions
    shapes = tuple(at[operand].shapes[0] for operand in "qab")
    pages = tuple(f"inputs[0].cache.pages[{layer}][{side}]" for side in (0, 1))
    return Kernel(name, at["k"], shapes, (None, *pages))


IN_PLACE = ", output_to_operand_aliasing={{0}: (1, {}), {1}: (2, {})}"


def test_attention_reads_each_rows_tokens_and_half_a_page():
    moved = KernelStep(**STEP).bytes(kernel("tree_attention"))
    assert moved == (3 * (1000 + 5 + 15.5) * TOKEN, 0)


def test_attention_reads_and_writes_queries_in_main_memory():
    queries = "bf16[3,2,16,128]{3,2,1,0}"
    size = 3 * 2 * 16 * 128 * 2
    moved = KernelStep(**STEP).bytes(kernel("tree_attention", queries=queries))
    assert moved == (3 * (1000 + 5 + 15.5) * TOKEN + size, size)


def test_a_window_cuts_whole_pages_of_its_own_layer():
    step = KernelStep(**STEP, layer_windows=(None, 200))
    whole, cut = (step.bytes(kernel("tree_attention", layer=i)).read for i in (0, 1))
    assert whole == 3 * (1000 + 5 + 15.5) * TOKEN
    assert cut == 3 * (199 + 5 + 15.5 + 15.5) * TOKEN
    short = KernelStep(**{**STEP, "context": 100}, layer_windows=(None, 200))
    assert short.bytes(kernel("tree_attention", layer=1)).read == 3 * (105 + 15.5) * TOKEN


@pytest.mark.parametrize("name", ["write_kv", "move_kv"])
def test_writing_reads_and_writes_stripes(name):
    stripes = 3 * (1 + 4 / 16) * 16 * TOKEN
    moved = KernelStep(**STEP).bytes(kernel(name, aliases=IN_PLACE))
    assert moved == (stripes, stripes)


def test_reading_for_a_move_reads_stripes():
    moved = KernelStep(**STEP).bytes(kernel("read_kv"))
    assert moved == (3 * (1 + 4 / 16) * 16 * TOKEN, 0)


def test_another_kernel_is_not_known():
    with pytest.raises(KeyError, match="flash"):
        KernelStep(**STEP).bytes(kernel("flash"))
