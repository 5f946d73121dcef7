"""What steps copy of the pool, from injected figures of two pools."""

import pytest

from specjax.planning.compiled_memory import never_below_smaller
from specjax.planning.pool_copies import (
    PLAIN,
    SPECULATING,
    kinds_to_compile_twice,
    pool_copies,
    seen_per_page,
    step_kind,
    whole_arrays,
)
from specjax.planning.workspace_fit import (
    BURST,
    MIXED,
    PREFILL,
    BucketMemory,
    StepShape,
    fit_workspaces,
)

LAYER, DRAFTER = 8000, 16_000  # bytes of a page: keys and values of one layer; of all
FEW, MANY = 100, 200  # pages


def step(kind, rows, tokens, k=0, temp=0):
    logits = tokens if kind == BURST else rows if kind == MIXED else 0
    bucket = StepShape(
        kind=kind,
        rows=rows,
        tokens=tokens,
        logit_tokens=logits,
        num_speculative_tokens=k,
    )
    return BucketMemory(
        bucket=bucket,
        argument_bytes=0,
        output_bytes=0,
        temp_bytes=temp,
        alias_bytes=0,
        code_bytes=0,
    )


def as_compiled(kind, rows, tokens, num_pages, k=0):
    """A step that needs logits or activations, and copies of two layers and the drafter.

    Prefills copy none, bursts of K = 0 the target's alone.
    """
    own = 50_000 * tokens if kind == BURST else 9000 * tokens
    per_page = {
        PLAIN: 2 * LAYER,
        SPECULATING: 2 * LAYER + DRAFTER,
        PREFILL: 0,
        MIXED: 2 * LAYER + DRAFTER,
    }
    memory = step(kind, rows, tokens, k)
    copied = per_page[step_kind(memory.bucket)] * num_pages
    return step(kind, rows, tokens, k, temp=own + copied)


STEPS = [
    (BURST, 8, 8, 0),
    (BURST, 8, 32, 3),
    (PREFILL, 1, 64, 0),
    (PREFILL, 8, 512, 0),
    (MIXED, 8, 264, 0),
]


def compiled(num_pages):
    return [as_compiled(kind, rows, n, num_pages, k) for kind, rows, n, k in STEPS]


def copies_of(few, many, num_layers=2):
    seen = {step_kind(a.bucket): seen_per_page(a, b, MANY - FEW) for a, b in zip(few, many)}
    return pool_copies(
        seen,
        layer_bytes=LAYER,
        drafter_bytes=DRAFTER,
        compiled_layers=2,
        num_layers=num_layers,
    )


def test_each_kind_of_step_loses_its_own_copies_and_no_others():
    few = compiled(FEW)
    copies = copies_of(few, compiled(MANY))
    left = {m.bucket: copies.without(m, FEW).temp_bytes for m in few}
    assert list(left.values()) == [
        50_000 * 8,
        50_000 * 32,
        9000 * 64,
        9000 * 512,
        9000 * 264,
    ]
    fit = fit_workspaces([copies.without(m, FEW) for m in few])
    assert fit.error < 0.001
    assert fit.scratch(step(BURST, 8, 16, 1).bucket) == pytest.approx(50_000 * 16)


def test_one_ratio_for_all_kinds_would_be_wrong():
    """What plain bursts copy, taken from every step: too much of some, too little of others."""
    few = compiled(FEW)
    wrong = [m.temp_bytes - 2 * LAYER * FEW for m in few]
    copies = copies_of(few, compiled(MANY))
    right = [copies.without(m, FEW).temp_bytes for m in few]
    assert wrong[2] < 0 < right[2]
    assert wrong[1] > 1.9 * right[1]


def test_copies_of_the_target_grow_with_its_layers_and_those_of_the_drafter_do_not():
    copies = copies_of(compiled(FEW), compiled(MANY), num_layers=32)
    assert copies.of_all[PLAIN] == 32 * LAYER
    assert copies.of_all[SPECULATING] == 32 * LAYER + DRAFTER
    assert copies.most_per_page == copies.page_bytes
    assert copies.ratio == 1


def test_copies_that_do_not_grow_with_layers_are_not_multiplied():
    seen = {PLAIN: 2 * LAYER, SPECULATING: 2 * LAYER + DRAFTER, PREFILL: 0.0}
    sizes = dict(layer_bytes=LAYER, drafter_bytes=DRAFTER, compiled_layers=2)
    same = pool_copies(seen, **sizes, num_layers=32, added_by_layer=0.0)
    assert same.of_all == same.compiled
    half = pool_copies(seen, **sizes, num_layers=32, added_by_layer=LAYER / 2)
    assert half.of_all[PLAIN] == 2 * LAYER + 30 * LAYER / 2
    assert half.of_all[SPECULATING] == half.of_all[PLAIN] + DRAFTER
    assert half.of_all[PREFILL] == 0


def test_copies_of_speculating_bursts_alone_grow_with_layers_too():
    sizes = dict(layer_bytes=LAYER, drafter_bytes=DRAFTER, compiled_layers=2)
    for copied, expected in (
        (2 * LAYER + DRAFTER, 32 * LAYER + DRAFTER),
        (2 * LAYER, 32 * LAYER),
        (LAYER, 16 * LAYER),
        (4 * LAYER + 2 * DRAFTER, 64 * LAYER + 2 * DRAFTER),
    ):
        seen = {PLAIN: 0.0, SPECULATING: copied}
        copies = pool_copies(seen, **sizes, num_layers=32, added_by_layer=0.0)
        assert copies.of_all[PLAIN] == 0
        assert copies.of_all[SPECULATING] == expected


def test_a_copy_that_something_else_outweighs_in_a_small_pool_counts_whole():
    """0.93 of an array was seen where the smaller pool's step needed something else."""
    assert whole_arrays(0.93 * LAYER / 2, LAYER / 2) == LAYER / 2
    assert whole_arrays(3.7 * LAYER / 2, LAYER / 2) == 2 * LAYER
    assert whole_arrays(2.001 * LAYER / 2, LAYER / 2) == LAYER
    assert whole_arrays(0.0, LAYER / 2) == whole_arrays(0.04 * LAYER, LAYER) == 0
    few, many = step(BURST, 8, 8, temp=2_000_000), step(BURST, 8, 8, temp=3_500_000)
    copies = copies_of([few], [many])
    assert copies.seen[PLAIN] == 15_000
    assert copies.compiled[PLAIN] == 2 * LAYER
    needed = lambda pages: max(2_000_000, 300_000 + 2 * LAYER * pages)
    assert needed(FEW) == few.temp_bytes
    assert needed(MANY) == many.temp_bytes
    for pages in (FEW, MANY, 10 * MANY):
        predicted = copies.without(few, FEW).temp_bytes + 2 * LAYER * pages
        assert needed(pages) <= predicted <= needed(pages) + 100_000


def test_the_largest_step_of_each_other_kind_is_compiled_for_two_pools():
    samples = [step(*s) for s in [*STEPS, (BURST, 4, 16, 3), (BURST, 2, 2, 0)]]
    twice = {(m.bucket.kind, m.bucket.tokens) for m in kinds_to_compile_twice(samples)}
    assert twice == {(BURST, 32), (PREFILL, 512), (MIXED, 264)}


def test_no_step_takes_less_than_a_smaller_one_of_its_kind():
    memories = [
        step(BURST, 8, 8, 0, temp=100),
        step(BURST, 8, 16, 1, temp=70),
        step(BURST, 4, 16, 3, temp=500),
        step(MIXED, 8, 264, temp=30),
    ]
    raised = [memory.temp_bytes for memory in never_below_smaller(memories)]
    assert raised == [100, 100, 500, 30]
