"""The text of an optimised program is read as it is written."""

import pytest

from tools.hlo_program import ArrayShape, array_shapes, parse

TEXT = r"""HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

FileNames
1 "/somewhere/f.py"

%inner (p: f32[8]) -> f32[8] {
  %p = f32[8]{0:T(256)} parameter(0)
  ROOT %twice = f32[8]{0:T(256)} add(%p, %p)
}

ENTRY %main.3 (x.1: f32[8], y.1: (s32[], bf16[4,16])) -> f32[8] {
  %x.1 = f32[8]{0:T(256)} parameter(0), metadata={op_name="inputs[1].target['norm']"}
  %y.1 = (s32[]{:T(128)}, bf16[4,16]{1,0:T(8,128)(2,1)S(1)}) parameter(1)
  %c = f32[] constant(2)
  %constant.5 = s32[2]{0} constant({1, 2})
  %part = s32[]{:T(128)} get-tuple-element(%y.1), index=0
  %k.2 = (f32[8]{0}, s32[2]{0}) custom-call(%x.1, /*index=1*/%constant.5), KERNEL
  %branch = f32[8]{0} conditional(%part, %x.1, %x.1), branch_computations={%inner, %inner.2}
  %loop = f32[8]{0} while(%branch), condition=%less, body=%inner, TURNS
  ROOT %out = f32[8]{0} fusion(%loop), kind=kLoop, calls=%inner
}
"""

TEXT = TEXT.replace("TURNS", 'backend_config={"known_trip_count":{"n":"5"}}').replace(
    "KERNEL",
    'custom_call_target="tpu_custom_call", '
    "output_to_operand_aliasing={{}: (3, {}), {2}: (1, {})}, "
    'metadata={op_name="jit(f)/write_kv/pallas_call" stack_frame_id=3}, '
    'backend_config={"body":"a(b{c"}',
)


@pytest.fixture(scope="module")
def main():
    program = parse(TEXT)
    assert program.entry == "main.3"
    assert list(program.computations) == ["inner", "main.3"]
    return program.computations["main.3"]


def test_instructions_in_order(main):
    names = "x.1 y.1 c constant.5 part k.2 branch loop out"
    assert list(main.instructions) == names.split()
    assert main.root.name == "out"
    assert [main.parameters[i].name for i in (0, 1)] == ["x.1", "y.1"]


def test_operands_and_users(main):
    at = main.instructions
    assert at["k.2"].operands == ("x.1", "constant.5")
    assert at["constant.5"].operands == ()
    assert [user.name for user in main.users["x.1"]] == ["k.2", "branch"]


def test_attributes(main):
    at = main.instructions
    assert at["x.1"].op_name == "inputs[1].target['norm']"
    assert at["k.2"].op_name == "jit(f)/write_kv/pallas_call"
    assert at["k.2"].target == "tpu_custom_call"
    assert at["k.2"].aliases == {0: 3, 2: 1}
    assert at["out"].aliases == {}
    assert at["part"].index == 0
    assert at["y.1"].index == 1
    assert at["branch"].called == ("inner", "inner.2")
    assert at["loop"].called == ("inner",)
    assert at["loop"].trip_count == 5
    assert at["out"].called == ("inner",)
    assert at["out"].trip_count is None


def test_branches_of_a_predicate_begin_with_false():
    line = (
        "  ROOT %c = f32[8]{0} conditional(%p, %a, %b), true_computation=%t, false_computation=%f"
    )
    program = parse(f"ENTRY %m (p: pred[]) -> f32[8] {{\n{line}\n}}\n")
    root = program.computations["m"].root
    assert root.called == ("f", "t")
    assert root.branches == (("f", "b"), ("t", "a"))


def test_branches_of_an_index_are_in_order():
    line = "  ROOT %c = f32[8]{0} conditional(%i, %a, %b), branch_computations={%f, %g}"
    program = parse(f"ENTRY %m (i: s32[]) -> f32[8] {{\n{line}\n}}\n")
    assert program.computations["m"].root.branches == (("f", "a"), ("g", "b"))


def test_shapes(main):
    number, array = main.instructions["y.1"].shapes
    assert main.instructions["y.1"].is_tuple
    assert number == ArrayShape("s32", (), (), (128,), 0)
    assert array == ArrayShape("bf16", (4, 16), (1, 0), (8, 128), 1)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("f32[3,5]", 60),
        ("bf16[3,5]{1,0}", 30),
        ("pred[7]{0}", 7),
        ("s4[6]{0}", 3),
        ("f8e4m3fn[16]{0}", 16),
        ("bf16[32,128]{1,0:T(8,128)(2,1)}", 32 * 128 * 2),
        # A column of numbers takes whole tiles.
        ("f32[160,1]{1,0:T(8,128)}", 160 * 128 * 4),
        ("f32[160,1]{0,1:T(8,128)}", 8 * 256 * 4),
        ("f32[160]{0:T(256)}", 256 * 4),
        ("f32[2,3,130]{2,0,1:T(8,128)}", 3 * 8 * 256 * 4),
    ],
)
def test_bytes_count_whole_tiles(text, num_bytes):
    (shape,) = array_shapes(text)
    assert shape.num_bytes == num_bytes
    assert shape.main_bytes == num_bytes


def test_other_memories_are_not_main_memory():
    (shape,) = array_shapes("f32[8]{0:T(256)S(1)}")
    assert (shape.num_bytes, shape.main_bytes) == (1024, 0)


def test_a_text_without_an_entry():
    with pytest.raises(ValueError, match="no entry computation"):
        parse("HloModule nothing\n")
    with pytest.raises(ValueError, match="no instruction"):
        parse("ENTRY %m (p: f32[]) -> f32[] {\n  what is this\n}\n")
