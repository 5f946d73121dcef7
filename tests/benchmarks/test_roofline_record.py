"""The record of bytes over minimum: its limits, and how a change is compared with it."""

import dataclasses
import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import roofline, roofline_measure, roofline_table
from benchmarks.roofline_cases import (
    CHAIN,
    DFLASH,
    EAGLE3,
    HEADS,
    P_EAGLE,
    PLAIN,
    Case,
    Layers,
    cases,
    few_layers,
    pairs,
)
from benchmarks.roofline_measure import (
    beyond,
    copies,
    copies_of_logits,
    extrapolated,
    flags_of,
    has_logits,
    keeps_draft_layers,
    minimum_bytes,
)
from specjax.planning.devices import Device
from specjax.planning.plan_request import PlanRequest
from tools.hlo_program import parse
from tools.program_traffic import Entry, Traffic

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / roofline.RECORD).read_text())
MOST = 1.15  # bytes over minimum of a step that plans promise nothing worse than
NAME = "Qwen3-0.6B, plain, 32 rows, v5e x1"


def found(ratio=1.1, flags=()):
    one = {"bytes": int(100 * ratio), "minimum": 100, "ratio": ratio}
    return {
        "compiled_by": "a compiler",
        "contexts": {"2048": one, "8192": one},
        "operations": 7,
        "collectives": 2,
        "collective_bytes": 1000000,
        "flags": list(flags),
        "beyond": [["fusion, while/body/add", 2500000]],
    }


@pytest.mark.parametrize("ratio", [1.0, 1.1, 1.154])
def test_equal_or_a_little_worse_passes(ratio):
    assert roofline.regressions("case", found(), found(ratio)) == []


def test_more_than_5_percent_worse_fails():
    lines = roofline.regressions("case", found(), found(1.156))
    assert lines[0] == "case, 2048 tokens: bytes over minimum 1.100 before, 1.156 now."
    assert lines[1].startswith("case, 8192 tokens")
    assert lines[-1].split() == ["2.5", "MB", "fusion,", "while/body/add"]


@pytest.mark.parametrize(("figure", "now"), [("operations", 8), ("collectives", 3)])
def test_more_operations_or_collectives_fail(figure, now):
    after = found() | {figure: now}
    (line, *_) = roofline.regressions("case", found(), after)
    assert line == f"case: {found()[figure]} {figure} before, {now} now."
    assert roofline.regressions("case", after, found()) == []


def test_another_compiler_is_named_where_something_is_worse():
    after = found(1.2) | {"compiled_by": "another"}
    assert "  Compiled by a compiler before, by another now." in roofline.regressions(
        "case", found(), after
    )
    assert roofline.regressions("case", found(), found() | {"compiled_by": "another"}) == []


def test_a_new_flag_fails_and_a_recorded_one_does_not():
    flag = "copy of inputs[1].w"
    (line, *_) = roofline.regressions("case", found(), found(flags=[flag]))
    assert line == f"case: {flag}, which was not there before."
    assert roofline.regressions("case", found(flags=[flag]), found(flags=[flag])) == []


def test_a_case_that_is_not_recorded_fails():
    assert "not recorded" in roofline.regressions("case", None, found())[0]


def test_check_exits_with_1_where_a_case_is_worse(monkeypatch, tmp_path, capsys):
    record = tmp_path / "roofline.json"
    record.write_text(json.dumps({NAME: found(1.0)}))
    monkeypatch.setattr(roofline, "RECORD", record)
    monkeypatch.setattr(roofline, "_use_no_device", lambda: None)
    for ratio, code in ((1.04, 0), (1.06, 1)):
        monkeypatch.setattr(roofline, "measure", lambda case, folder, r=ratio: found(r))
        assert roofline.main(["--check", "--only", NAME]) == code
    assert "1.060 now" in capsys.readouterr().out


def test_record_goes_on_where_it_was_left(monkeypatch, tmp_path):
    record, table = tmp_path / "roofline.json", tmp_path / "roofline.md"
    names = [case.name for case in cases()]
    record.write_text(json.dumps({name: found() for name in names[1:]}))
    asked = []
    monkeypatch.setattr(roofline, "RECORD", record)
    monkeypatch.setattr(roofline, "TABLE", table)
    monkeypatch.setattr(roofline, "_use_no_device", lambda: None)
    monkeypatch.setattr(
        roofline, "measure", lambda case, folder: asked.append(case.name) or found(1.2)
    )
    assert roofline.main(["--record"]) == 0
    assert asked == names[:1]
    assert list(json.loads(record.read_text())) == names
    assert f"| {names[0]} | 1.200 | 1.200 |" in table.read_text()


def test_cases_have_names_of_their_own():
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names) == 82
    assert [case.name for case in roofline.chosen([NAME])] == [NAME]
    asked = [names[7], NAME, names[7]]
    assert [case.name for case in roofline.chosen(asked)] == asked[:2]
    assert [case.name for case in roofline.chosen(None)] == names
    with pytest.raises(ValueError, match="no case is named 'Qwen2'"):
        roofline.chosen(["Qwen2"])


@pytest.mark.parametrize("name", list(pairs()))
def test_whole_periods_lead_from_few_layers_to_all(name):
    target = pairs()[name].target
    few, more = few_layers(target)
    assert few >= 2
    assert (target.num_layers - few) % (more - few) == 0
    if windows := target.layer_windows:
        # What one period adds, all further ones add.
        far = lambda count: windows[:count].count(None)
        added = (target.num_layers - few) // (more - few) * (far(more) - far(few))
        assert far(target.num_layers) == far(few) + added


def test_layers_of_target_and_draft_model_add_up():
    case = Case("Llama-3.1-8B", CHAIN, 32, "v5e", 1)
    assert case.compiled_layers == [Layers(2, 2), Layers(4, 2), Layers(2, 4)]
    # 10 of a step, 3 of each layer of the target, 5 of each layer of the draft model.
    figures = [10 + 3 * target + 5 * draft for target, draft in case.compiled_layers]
    assert extrapolated(figures, case.compiled_layers, case.all_layers) == 10 + 3 * 32 + 5 * 16


def split_over(chips, case):
    """What a case's plan asks for, on devices that are there."""
    return PlanRequest(
        target=case.target,
        target_name="",
        drafter=case.spec.split(chips),
        drafter_name="",
        device=Device("cpu", chips, None, None),
        dtype="bfloat16",
        num_speculative_tokens=case.num_speculative_tokens,
    )


@pytest.mark.parametrize(("forwards", "expected"), [(4.0, False), (4.5, False), (3.9, True)])
def test_layers_of_a_draft_model_that_stay_in_fast_memory_are_noticed(forwards, expected):
    case = Case("Llama-3.1-8B", CHAIN, 1, "v5e", 4)
    layer = DRAFT_LAYER * 2 / 4  # bytes on one of four chips
    reads = tuple(
        (f"inputs[1].drafter['layers'][{i}]['q_proj']", forwards * layer) for i in range(2)
    )
    other = ("inputs[1].drafter['embed_tokens']", 1e12)
    traffic = Traffic((entry("%y = f32[8]{0} add(%x)", sources=(*reads, other)),))
    assert keeps_draft_layers(case, split_over(4, case), Layers(2, 2), traffic) == expected


def test_without_a_draft_model_nothing_of_it_is_kept():
    case = Case(*NAME.split(", ")[:2], 32, "v5e", 1)
    assert not keeps_draft_layers(case, split_over(4, case), Layers(2, 0), Traffic(()))


LLAMA, DRAFT = 7_504_924_672, 1_235_814_400  # numbers read of weights: not of the 8B's embedding
DRAFT_LAYER = 60_821_504
TOKEN, DRAFT_TOKEN = 2 * 32 * 8 * 128, 2 * 16 * 8 * 64  # numbers in keys and values


@pytest.mark.parametrize("chips", [1, 4])
def test_the_minimum_is_each_weight_and_each_key_once_per_forward(chips):
    case = Case("Llama-3.1-8B", CHAIN, 2, "v5e", chips)
    request = split_over(chips, case)
    target = LLAMA + 2 * (1000 + 5) * TOKEN
    drafts = 4 * (DRAFT + 2 * (1000 + 1) * DRAFT_TOKEN)
    assert minimum_bytes(case, request, 1000) == 2 * (target + drafts) / chips


EAGLE3_LAYER = 4096 * 8192 + 2 * 1024 * 8192 + 4096**2 + 3 * 4096 * 14_336
BLOCK_LAYER = 2 * 4096**2 + 2 * 1024 * 4096 + 3 * 4096 * 14_336


@pytest.mark.parametrize(
    ("draft", "nodes", "numbers", "context"),
    [
        # Four forwards, the first of them of what is absorbed.
        (EAGLE3, 5, 4 * (EAGLE3_LAYER + 32_000 * 4096) + 3 * 4096**2, 4 * 2 * 1024),
        # One forward of a block; what is absorbed takes keys and values of each layer.
        (
            DFLASH,
            8,
            5 * BLOCK_LAYER + 128_256 * 4096 + 5 * 4096**2 + 5 * 2 * 1024 * 4096,
            5 * 2 * 1024,
        ),
        # One forward of pairs and masks.
        (
            P_EAGLE,
            5,
            EAGLE3_LAYER + 3 * BLOCK_LAYER + 32_000 * 4096 + 3 * 4096**2,
            4 * 2 * 1024,
        ),
    ],
)
def test_a_head_absorbs_what_was_accepted(draft, nodes, numbers, context):
    case = Case("Llama-3.1-8B", draft, 2, "v5e", 1)
    request = dataclasses.replace(split_over(1, plain_of(case)), drafter=case.spec)
    target = LLAMA + 2 * (1000 + nodes) * TOKEN
    captured = 2 * 2 * nodes * len(case.spec.taps) * 4096
    expected = 2 * (target + numbers + 2 * 1000 * context + captured)
    assert minimum_bytes(case, request, 1000) == pytest.approx(expected, rel=1e-4)


def test_a_head_that_defers_also_stores_a_vector_per_node():
    case = Case("Llama-3.1-8B", P_EAGLE, 2, "v5e", 1)
    without = dataclasses.replace(case.spec, store_features=False)
    absorbed = functools.partial(roofline_measure._absorbed, case)
    assert absorbed(case.spec, 5) - absorbed(without, 5) == 2 * 5 * 4096
    captured = dataclasses.replace(case.spec, store_features="captured")
    assert absorbed(captured, 5) - absorbed(without, 5) == 2 * 5 * 3 * 4096


def plain_of(case):
    return dataclasses.replace(case, draft=PLAIN)


def test_bytes_beyond_the_minimum_are_named_by_place():
    path = ', metadata={op_name="jit(burst)/while/body/add"}'
    of = lambda kind, name="y", **fields: entry(f"%{name} = f32[8]{{0}} {kind}(%x){path}", **fields)
    entries = [
        of("add", read=3.0, written=4.0),
        of("add", read=3.0, sources=(("inputs[1].w", 2.0), ("inputs[0].x", 1.0))),
        of("custom-call", "tree_attention.3", read=900.0),
        *(of(f"kind{i}", read=10.0 * i) for i in range(1, 6)),
    ]
    found = beyond(Traffic(tuple(entries)))
    assert found[-1] == ["kind1, while/body/add", 10]
    assert [bytes_ for _, bytes_ in found] == [50, 40, 30, 20, 10]
    assert beyond(Traffic(tuple(entries[:3]))) == [["add, while/body/add", 8]]


def entry(line, **fields):
    text = f"ENTRY %m (p: f32[]) -> f32[] {{\n  ROOT {line}\n}}"
    one = parse(text).computations["m"].root
    return Entry(**{"instruction": one, "times": 1, "read": 0.0, "written": 0.0, **fields})


@pytest.mark.parametrize(
    ("line", "is_move", "expected"),
    [
        ("%y = f32[32,1000]{1,0} copy(%x)", True, True),
        ("%y = f32[32,250]{1,0} copy(%x)", True, True),  # a chip's share of four
        ("%y = f32[32,1000]{1,0:S(1)} copy(%x)", True, False),
        ("%y = f32[32,1000]{1,0} fusion(%x)", False, False),
        ("%y = f32[31,250]{1,0} copy(%x)", True, False),
        ("%y = f32[32,999]{1,0} copy(%x)", True, False),
        ("%y = f32[32,1000]{1,0} all-gather(%x)", False, True),
        ("%y = f32[4,250,32]{1,0,2:S(1)} all-gather(%x)", False, True),
        ("%y = f32[4,250,31]{1,0,2} all-gather(%x)", False, False),
        ("%y = f32[64,500]{1,0} all-gather(%x)", False, False),
    ],
)
def test_logits_that_are_copied_or_gathered(line, is_move, expected):
    one = entry(line, written=1.0, is_mere_move=is_move)
    assert has_logits(one, 1000, 32, 4) is expected


def test_copies_of_pages_and_weights():
    of = lambda line, **fields: entry(line, **{"copied": (), **fields})
    copy = "%y = f32[8]{0} copy(%x)"
    entries = [
        of(copy, written=2.0, copied=("inputs[1].target['norm']",)),
        of(copy, written=3.0, copied=("inputs[0].drafter.pages[0]",)),
        of("%y = f32[8]{0} all-gather(%x)", collective_bytes=5.0, copied=("inputs[1].head",)),
        of(copy, written=900.0, copied=("inputs[0].history",)),
    ]
    lines, bytes_ = copies(Traffic((*entries, *entries)))
    assert lines == [
        "copy of inputs[1].target['norm']",
        "copy of inputs[0].drafter.pages[0]",
        "all-gather of inputs[1].head",
    ]
    assert bytes_ == 20


def test_copies_that_weigh_are_flagged():
    assert flags_of(["copy of w"], 5, 1000) == ["copy of w"]
    assert flags_of(["copy of w"], 4.9, 1000) == []


def test_every_copy_of_logits_is_flagged():
    case = Case("Qwen3-0.6B", PLAIN, 32, "v5e", 1)
    path = ', metadata={op_name="jit(burst)/while/body/add"}'
    copy = entry("%y = f32[32,151936]{1,0} copy(%x)" + path, written=1.0, is_mere_move=True)
    rest = entry("%y = f32[8]{0} negate(%x)", read=1e12)
    assert copies_of_logits(case, Traffic((copy, copy, rest))) == ["copy of logits, while/body/add"]


@pytest.mark.parametrize("name", list(RECORD))
def test_recorded_steps_are_near_their_minimum(name):
    case = next(case for case in cases() if case.name == name)
    figures = RECORD[name]
    if not figures.get("keeps_draft_layers"):
        assert all(one["ratio"] >= 1 for one in figures["contexts"].values())
    if case.rows == 32 and case.draft in (PLAIN, CHAIN):
        assert all(one["ratio"] <= MOST for one in figures["contexts"].values())
        assert figures["flags"] == []


def test_the_table_is_that_of_the_record():
    assert (ROOT / roofline.TABLE).read_text() == roofline_table.page(RECORD)


@pytest.mark.parametrize("head", HEADS)
def test_a_loop_draws_all_tokens_of_a_head_but_the_first(monkeypatch, head):
    monkeypatch.setattr(roofline_measure, "step_traffic", lambda program, step: step.turns)
    case = Case("Llama-3.1-8B", head, 32, "v5e", 4)
    request = SimpleNamespace(drafter=case.spec)
    turns = roofline_measure._traffic(case, request, None, 2048)
    caught_up = (0,) if head == P_EAGLE else ()
    assert turns == (*caught_up, {DFLASH: 7}.get(head, 4) - 1)
