"""Bytes of small programs written by hand, with known answers."""

import pytest

from tools.hlo_program import parse
from tools.program_traffic import Moved, OrdinaryStep, Traffic, step_traffic

FRAME = r"""
%less (c: (s32[], f32[100], f32[10,100], f32[100])) -> pred[] {{
  %c = (s32[], f32[100], f32[10,100], f32[100]) parameter(0)
  ROOT %true = pred[] constant(true)
}}
{others}
%body (s: (s32[], f32[100], f32[10,100], f32[100])) -> (s32[], f32[100], f32[10,100], f32[100]) {{
  %s = (s32[], f32[100], f32[10,100], f32[100]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[100]{{0}} get-tuple-element(%s), index=1
  %w = f32[10,100]{{1,0}} get-tuple-element(%s), index=2
  %pages = f32[100]{{0}} get-tuple-element(%s), index=3
{lines}
  ROOT %t = (s32[], f32[100], f32[10,100], f32[100]) tuple(%i, %x, %w, %pages)
}}

ENTRY %main (i.1: s32[], x.1: f32[100], w.1: f32[10,100], p.1: f32[100]) -> f32[100] {{
  %i.1 = s32[] parameter(0)
  %x.1 = f32[100]{{0}} parameter(1), metadata={{op_name="inputs[0].x"}}
  %w.1 = f32[10,100]{{1,0}} parameter(2), metadata={{op_name="inputs[1].w"}}
  %p.1 = f32[100]{{0}} parameter(3), metadata={{op_name="inputs[0].cache.pages"}}
  %before = f32[100]{{0}} negate(%x.1)
  %init = (s32[], f32[100], f32[10,100], f32[100]) tuple(%i.1, %x.1, %w.1, %p.1)
  %loop = (s32[], f32[100], f32[10,100], f32[100]) while(%init), condition=%less, body=%body
  ROOT %out = f32[100]{{0}} get-tuple-element(%loop), index=1
}}
"""
X, W = 400, 4000  # bytes of x or pages, and of w


def traffic(lines, others="", turns=(), kernels=None):
    known = kernels or {}
    step = OrdinaryStep(turns=turns, kernel_bytes=lambda kernel: known[kernel.name](kernel))
    found = step_traffic(parse(FRAME.format(lines=lines, others=others)), step)
    kept, *entries = found.entries
    assert (kept.instruction.name, kept.bytes) == ("loop", 0)
    return Traffic(tuple(entries))


def test_one_turn_of_the_loop_over_steps_is_counted():
    found = traffic("  %y = f32[100]{0} negate(%x)")
    (entry,) = found.entries
    assert (entry.read, entry.written, entry.times) == (X, X, 1)
    assert found.num_operations == 1


def test_what_stays_in_fast_memory_from_step_to_step_is_read_in_each():
    text = FRAME.format(lines="", others="")
    fast = "f32[10,100]{1,0:S(1)}"
    text = text.replace(
        "  %init =",
        f"  %w.2 = {fast} copy(%w.1)\n  %y = f32[100]{{0:S(1)}} negate(%x.1)\n  %init =",
    )
    text = text.replace("tuple(%i.1, %x.1, %w.1, %p.1)", "tuple(%i.1, %y, %w.2, %p.1)")
    text = text.replace(
        "%loop = (s32[], f32[100], f32[10,100],", f"%loop = (s32[], f32[100]{{0:S(1)}}, {fast},"
    )
    (kept,) = step_traffic(parse(text), OrdinaryStep(turns=(), kernel_bytes=None)).entries
    assert (kept.read, kept.written, kept.times) == (W, 0, 0)
    assert kept.sources == (("inputs[1].w", W),)


def test_views_and_fast_memory_are_free():
    lines = """
  %a = f32[10,10]{1,0} bitcast(%x)
  %b = (f32[10,10]) tuple(%a)
  %c = f32[100]{0:S(1)} negate(%x)
  %d = f32[100]{0:S(1)} negate(%c)
  %e = f32[100]{0} negate(%d)"""
    assert [entry.bytes for entry in traffic(lines).entries] == [X, 0, X]


def test_asynchronous_copies_count_once():
    lines = """
  %s.1 = (f32[10,100]{1,0:S(1)}, f32[10,100]{1,0}, u32[]{:S(2)}) copy-start(%w)
  %d.1 = f32[10,100]{1,0:S(1)} copy-done(%s.1)
  %y = f32[100]{0:S(1)} custom-call(%d.1), custom_call_target="TopK"
  %s.2 = (f32[100]{0}, f32[100]{0:S(1)}, u32[]{:S(2)}) copy-start(%y)
  %d.2 = f32[100]{0} copy-done(%s.2)
  %s.3 = ((f32[10,100]{1,0}), f32[2,100]{1,0:S(1)}, u32[]{:S(2)}) slice-start(%w)
  %d.3 = f32[2,100]{1,0:S(1)} slice-done(%s.3)"""
    found = traffic(lines)
    assert [(e.read, e.written) for e in found.entries] == [(W, 0), (0, 0), (0, X), (800, 0)]
    assert found.read_of("inputs[1]") == W + 800
    assert not any(entry.copied for entry in found.entries)


def test_a_fusion_reads_its_operands_and_writes_its_results():
    others = """
%fused (a: f32[100], b: f32[10,100]) -> (f32[100], f32[10,100]) {
  %a = f32[100]{0} parameter(0)
  %b = f32[10,100]{1,0} parameter(1)
  %c = f32[10,100]{1,0} broadcast(%a), dimensions={1}
  %d = f32[10,100]{1,0} add(%b, %c)
  %e = f32[10,100]{1,0} multiply(%d, %d)
  ROOT %r = (f32[100]{0}, f32[10,100]{1,0}) tuple(%a, %e)
}"""
    lines = "  %y = (f32[100]{0}, f32[10,100]{1,0:S(1)}) fusion(%x, %w), kind=kLoop, calls=%fused"
    (entry,) = traffic(lines, others).entries
    assert (entry.read, entry.written) == (X + W, X)
    assert entry.sources == (("inputs[0].x", X), ("inputs[1].w", W))


def test_a_fusion_of_several_results_at_once():
    others = """
%fused (a: f32[10,100]) -> (f32[100], s32[100]) {
  %a = f32[10,100]{1,0} parameter(0)
  ROOT %r = (f32[100]{0}, s32[100]{0}) reduce(%a, %a), to_apply=%best
}"""
    lines = "  %y = (f32[100]{0}, s32[100]{0:S(1)}) fusion(%w), kind=kLoop, calls=%fused"
    (entry,) = traffic(lines, others).entries
    assert (entry.read, entry.written) == (W, X)


def test_a_fusion_that_gathers_reads_what_it_gathers():
    others = """
%deeper (b: f32[10,100], i: s32[]) -> f32[1,100] {
  %b = f32[10,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %d = f32[1,100]{1,0} dynamic-slice(%b, %i, %i), dynamic_slice_sizes={1,100}
}
%fused (a: f32[10,100], j: s32[]) -> f32[2,100] {
  %a = f32[10,100]{1,0} parameter(0)
  %j = s32[] parameter(1)
  %g = f32[2,100]{1,0} gather(%a, %j), slice_sizes={1,100}
  %f = f32[1,100]{1,0} fusion(%a, %j), kind=kLoop, calls=%deeper
  %h = f32[2,100]{1,0} broadcast(%f), dimensions={0,1}
  ROOT %r = f32[2,100]{1,0} add(%g, %h)
}"""
    lines = "  %y = f32[2,100]{1,0:S(1)} fusion(%w, %i), kind=kLoop, calls=%fused"
    (entry,) = traffic(lines, others).entries
    assert entry.read == 800 + 400 + 4  # and the index


def test_an_update_in_place_counts_what_is_put():
    others = """
%fused (a: f32[100], u: f32[5], j: s32[]) -> f32[100] {
  %a = f32[100]{0} parameter(0)
  %u = f32[5]{0} parameter(1)
  %j = s32[] parameter(2)
  ROOT %r = f32[100]{0} dynamic-update-slice(%a, %u, %j)
}"""
    lines = """
  %u.1 = f32[5]{0} slice(%x), slice={[0:5]}
  %y = f32[100]{0} fusion(%pages, %u.1, %i), kind=kLoop, calls=%fused
  %z = f32[100]{0} dynamic-update-slice(%y, %u.1, %i)
  %v = f32[100]{0} copy(%z)"""
    part, fused, alone, copy = traffic(lines, others).entries
    assert (part.read, part.written) == (20, 20)
    assert (fused.read, fused.written) == (24, 20)
    assert (alone.read, alone.written) == (24, 20)
    # What was updated in place is still the array of pages.
    assert copy.copied == ("inputs[0].cache.pages",)


def test_an_ordinary_step_takes_the_branches_it_says():
    others = """
%small (p: f32[100]) -> f32[100] {
  %p = f32[100]{0} parameter(0)
  ROOT %n = f32[100]{0} negate(%p)
}
%large (q: f32[10,100]) -> f32[100] {
  %q = f32[10,100]{1,0} parameter(0)
  ROOT %m = f32[100]{0} reduce(%q), to_apply=%small
}"""
    of = lambda branches, arguments: (
        f"  %y = f32[100]{{0}} conditional(%i, {arguments}), branch_computations={{{branches}}}"
    )
    two = traffic(of("%small, %large", "%x, %w"), others)
    assert [entry.instruction.name for entry in two.entries] == ["n"]
    three = traffic(of("%small, %large, %small", "%x, %w, %x"), others)
    assert [entry.instruction.name for entry in three.entries] == ["m"]
    assert three.read_of("inputs[1].w") == W
    with pytest.raises(ValueError, match="has 4 branches"):
        traffic(of("%small, %large, %small, %small", "%x, %w, %x, %x"), others)


LOOPS = """
%more (c: (f32[100])) -> pred[] {
  %c = (f32[100]) parameter(0)
  ROOT %true = pred[] constant(true)
}
%turn (p: (f32[100])) -> (f32[100]) {
  %p = (f32[100]) parameter(0)
  %e = f32[100]{0} get-tuple-element(%p), index=0
  %n = f32[100]{0} negate(%e)
  ROOT %r = (f32[100]{0}) tuple(%n)
}"""


def test_loops_count_their_turns():
    known = ', backend_config={"known_trip_count":{"n":"5"}}'
    loop = "  %{name} = (f32[100]{{0}}) while(%in), condition=%more, body=%turn{known}"
    lines = "\n".join(
        [
            "  %in = (f32[100]{0}) tuple(%x)",
            loop.format(name="a", known=""),
            loop.format(name="b", known=known),
            loop.format(name="c", known=""),
        ]
    )
    found = traffic(lines, LOOPS, turns=(3, 0))
    assert [entry.times for entry in found.entries] == [3, 5]
    assert found.bytes == 8 * 2 * X
    assert found.num_operations == 8
    with pytest.raises(ValueError, match="is number 2, and an ordinary step has 1"):
        traffic(lines, LOOPS, turns=(3,))
    with pytest.raises(ValueError, match="has 2 loops, and 3"):
        traffic(lines, LOOPS, turns=(3, 0, 0))


@pytest.mark.parametrize(
    ("root", "turns"),
    [
        ("compare(%i, %n), direction=LT", 4),
        ("compare(%i, %n), direction=NE", None),
        ("compare(%i, %m), direction=LT", None),
        ("and(%i, %n)", None),
    ],
)
def test_a_loop_up_to_a_constant_counts_by_its_condition(root, turns):
    condition = f"""
%below (c: (s32[], s32[])) -> pred[] {{
  %c = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %m = s32[] get-tuple-element(%c), index=1
  %n = s32[] constant(4)
  ROOT %lt = pred[] {root}
}}"""
    lines = """
  %in = (f32[100]{0}) tuple(%x)
  %a = (f32[100]{0}) while(%in), condition=%below, body=%turn
"""
    if turns is None:
        with pytest.raises(ValueError, match="say how often it turns"):
            traffic(lines, LOOPS + condition)
    else:
        (entry,) = traffic(lines, LOOPS + condition).entries
        assert entry.times == turns


def test_kernels_count_by_formulas():
    call = (
        'custom_call_target="tpu_custom_call", output_to_operand_aliasing={{0}: (0, {})}, '
        'metadata={op_name="jit(burst)/write_kv/pallas_call"}'
    )
    lines = f"""
  %k = (f32[100]{{0}}, f32[100]{{0:S(1)}}) custom-call(%pages, %x), {call}
  %k.0 = f32[100]{{0}} get-tuple-element(%k), index=0
  %v = f32[100]{{0}} copy(%k.0)"""
    seen = []

    def write_kv(kernel):
        seen.append(kernel)
        return Moved(7, 11)

    first, copy = traffic(lines, kernels={"write_kv": write_kv}).entries
    assert (first.read, first.written) == (7, 11)
    assert seen[0].origins == ("inputs[0].cache.pages", "inputs[0].x")
    assert seen[0].rest == Moved(X, 0)
    assert copy.copied == ("inputs[0].cache.pages",)
    with pytest.raises(ValueError, match=r"kernel write_kv .*has no known bytes"):
        traffic(lines)


def test_collectives_are_listed():
    lines = """
  %a = f32[100]{0:S(1)} all-reduce(%x), to_apply=%add
  %b = (f32[10,100]{1,0}, f32[40,100]{1,0}) all-gather-start(%w), dimensions={0}
  %c = f32[40,100]{1,0} all-gather-done(%b)"""
    found = traffic(lines)
    assert (found.num_collectives, found.collective_bytes) == (2, X + 4 * W)
    reduced, gathered = found.collectives
    assert (reduced.bytes, reduced.copied) == (X, ())
    assert (gathered.bytes, gathered.copied) == (W + 4 * W, ("inputs[1].w",))


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("%y = f32[10,100]{1,0} copy(%w)", ("inputs[1].w",)),
        ("%y = f32[100,10]{1,0} transpose(%w), dimensions={1,0}", ("inputs[1].w",)),
        ("%y = f32[10,100]{1,0:S(1)} copy(%w)", ()),
        ("%y = f32[4,100]{1,0} slice(%w), slice={[0:4], [0:100]}", ()),
        ("%y = f32[10,100]{1,0} negate(%w)", ()),
        ("%y = f32[10,100]{0,1} fusion(%w), kind=kLoop, calls=%lays", ("inputs[1].w",)),
        ("%y = f32[10,100]{1,0} fusion(%w), kind=kLoop, calls=%doubles", ()),
    ],
)
def test_copies_of_arguments_are_known(line, names):
    fused = """
%{name} (a: f32[10,100]) -> f32[10,100] {{
  %a = f32[10,100]{{1,0}} parameter(0)
  ROOT %r = f32[10,100] {operation}
}}"""
    others = fused.format(name="lays", operation="copy(%a)")
    others += fused.format(name="doubles", operation="add(%a, %a)")
    (entry,) = traffic(f"  {line}", others).entries
    assert entry.copied == names


def test_a_program_without_a_loop():
    text = "ENTRY %m (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}\n"
    with pytest.raises(ValueError, match="no loop over steps"):
        step_traffic(parse(text), OrdinaryStep(turns=(), kernel_bytes=lambda _: Moved(0, 0)))
