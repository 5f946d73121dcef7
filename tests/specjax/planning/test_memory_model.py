"""Pages, limits and the gate: figures counted by hand, and the edges of the formulas."""

import dataclasses
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.planning.memory_model import (
    MOST_MARGIN,
    SAFETY_POINTS,
    MemoryLimits,
    PrefillCoefficients,
    bytes_per_token,
    fit_prefill,
    larger_of,
    next_token_coefficient,
    pages_ratio,
    plan_memory,
    recommended_margin,
)
from specjax.planning.workspace_fit import (
    BURST,
    MIXED,
    PREFILL,
    BucketMemory,
    StepShape,
    combined_bytes,
    fewest_nonnegative,
    fit_lines,
    fit_workspaces,
)


def burst(rows, k, scratch, code=0, copied=0):
    tokens = rows * (1 + k)
    bucket = StepShape(
        kind=BURST,
        rows=rows,
        tokens=tokens,
        logit_tokens=tokens,
        copied_rows=copied,
        num_speculative_tokens=k,
    )
    return memory(bucket, scratch, code)


def prefill(places, width, scratch, code=0):
    bucket = StepShape(kind=PREFILL, rows=places, tokens=places * width)
    return memory(bucket, scratch, code)


def mixed(rows, width, scratch, code=0):
    beside = {"prompt_tokens": width, "prompt_places": 1}
    bucket = StepShape(kind=MIXED, rows=rows, tokens=rows + width, logit_tokens=rows, **beside)
    return memory(bucket, scratch, code)


def memory(bucket, scratch, code=0, arguments=0):
    return BucketMemory(
        bucket=bucket,
        argument_bytes=arguments,
        output_bytes=0,
        temp_bytes=scratch,
        alias_bytes=0,
        code_bytes=code,
    )


def limits(**changes):
    given = dict(free_bytes=1_000_000, page_size=10, rows=4, max_context=1000)
    return MemoryLimits(**{**given, **changes})


# What a compiled step says of itself


def test_workspace_counts_what_does_not_lie_in_donated_arguments():
    analysis = types.SimpleNamespace(
        argument_size_in_bytes=1000,
        output_size_in_bytes=500,
        temp_size_in_bytes=70,
        alias_size_in_bytes=480,
        generated_code_size_in_bytes=5,
    )
    own = BucketMemory.of(burst(1, 0, 0).bucket, analysis)
    assert own.argument_bytes == 1000
    assert own.scratch_bytes == 70 + 500 - 480
    assert own.workspace_bytes == 95


def test_one_runs_at_a_time_and_all_are_loaded():
    steps = [burst(1, 0, 100, code=7), burst(1, 1, 300, code=8), prefill(1, 8, 200, 9)]
    assert combined_bytes(steps) == 300 + 7 + 8 + 9
    assert combined_bytes([]) == 0


@pytest.mark.parametrize("changes", [dict(kind="draft"), dict(rows=0), dict(tokens=3)])
def test_buckets_that_cannot_be(changes):
    with pytest.raises(ValueError, match=r"kind|cannot be"):
        StepShape(**{**dict(kind=BURST, rows=4, tokens=8), **changes})


# Fits


def test_coefficients_are_the_fewest_that_do_and_never_below_zero():
    tokens = np.array([8.0, 16.0, 64.0, 256.0])
    features = np.stack([tokens, np.array([8.0, 4.0, 8.0, 4.0]), np.ones(4)], axis=1)
    np.testing.assert_allclose(fewest_nonnegative(features, 6.0 * tokens), [6.0, 0.0, 0.0])
    np.testing.assert_allclose(
        fewest_nonnegative(features, 6.0 * tokens + 100.0), [6.0, 0.0, 100.0]
    )
    falling = fewest_nonnegative(features, 1000.0 - tokens)
    assert np.all(falling >= 0)


def test_a_step_in_the_line_is_found():
    """As XLA has it on CPU: 6 arrays of logits up to 64 tokens, 5 above."""
    tokens = [8, 16, 32, 64, 96, 128, 256]
    used = [(6 if t <= 64 else 5) * 1000 * t for t in tokens]
    found = fit_lines([(t, 1.0) for t in tokens], used)
    assert found.bend == 96
    assert found.error < 1e-9
    assert found((48, 1.0)) == pytest.approx(288_000)
    assert found((512, 1.0)) == pytest.approx(2_560_000)
    # Between the last of one and the first of the other the higher one counts.
    assert found((80, 1.0)) == pytest.approx(480_000)


def test_a_known_bend_needs_no_sample_beside_it():
    tokens = [8, 16, 256, 512]
    used = [(6 if t <= 64 else 5) * 1000 * t for t in tokens]
    found = fit_lines([(t, 1.0) for t in tokens], used, known_bend=64)
    assert found((64, 1.0)) == pytest.approx(384_000)
    assert found((65, 1.0)) == pytest.approx(325_000)


@given(
    st.lists(st.integers(1, 4096), min_size=1, max_size=9, unique=True),
    st.randoms(use_true_random=False),
)
@settings(max_examples=200, deadline=None)
def test_no_sample_is_above_its_prediction(tokens, random):
    used = [random.uniform(0.5, 2.0) * 1000 * t + 50 for t in tokens]
    sizes = [(float(t), 1.0) for t in tokens]
    found = fit_lines(sizes, used)
    for size, bytes_used in zip(sizes, used):
        assert found(size) >= bytes_used * (1 - 1e-9)
    misses = [found(size) / bytes_used - 1 for size, bytes_used in zip(sizes, used)]
    assert found.error == pytest.approx(max(misses), abs=1e-9)


def test_kinds_are_fitted_apart_and_mixed_steps_are_the_larger_of_both():
    samples = [
        burst(8, 0, 8 * 100),
        burst(8, 3, 32 * 100),
        prefill(8, 64, 512 * 10, code=4),
        prefill(1, 256, 256 * 10),
        mixed(8, 256, 2700),
    ]
    fit = fit_workspaces(samples)
    assert fit(burst(8, 1, 0).bucket) == pytest.approx(1600)
    assert fit(prefill(1, 64, 0).bucket) == pytest.approx(640 + 4)
    # 264 tokens through the layers take 2640; the sample took 60 more.
    assert fit.scratch(mixed(8, 256, 0).bucket) == pytest.approx(2700)
    assert fit.scratch(mixed(40, 24, 0).bucket) == pytest.approx(4000 + 60)


def test_a_prompt_alone_may_take_more_per_token():
    """As XLA has it on CPU for a model of width 64."""
    samples = [burst(8, 0, 800), prefill(1, 64, 64 * 40), prefill(8, 64, 512 * 30)]
    fit = fit_workspaces(samples)
    assert fit(prefill(1, 256, 0).bucket) == pytest.approx(256 * 40)
    assert fit(prefill(2, 256, 0).bucket) == pytest.approx(512 * 30)


def test_rows_that_are_taken_out_and_put_back_cost_their_copies():
    samples = [
        burst(rows, k, rows * (1 + k) * 100 + (5000 * rows if rows == 2 else 0), 0, own)
        for rows, own in ((2, 2), (8, 0))
        for k in (0, 3)
    ]
    fit = fit_workspaces(samples)
    assert fit(burst(4, 1, 0, copied=4).bucket) == pytest.approx(800 + 20_000, rel=0.01)


def test_what_rules_compare_is_counted_beside_the_logits():
    def by_rule(rows, k):
        own = burst(rows, k, 0).bucket
        law = own.tokens if k else 0
        bucket = dataclasses.replace(own, law_tokens=law)
        return memory(bucket, 500 * own.tokens + 600 * law)

    fit = fit_workspaces([by_rule(rows, k) for rows in (2, 8) for k in (0, 3)])
    for rows, k in ((4, 0), (4, 1), (8, 2)):
        expected = by_rule(rows, k).scratch_bytes
        assert fit.scratch(by_rule(rows, k).bucket) == pytest.approx(expected)


def test_nothing_to_fit():
    with pytest.raises(ValueError, match="nothing to fit"):
        fit_workspaces([])


# Prefill


def test_prefill_is_a_line_where_it_is_straight():
    found = fit_prefill([64, 128, 512], [6400, 12800, 51200])
    assert found.linear == pytest.approx(100)
    assert found.bend is None
    assert found.error < 1e-9


def test_the_bend_of_a_prefill_is_found():
    """100 bytes per token up to 512 tokens; then what two scores per pair of tokens take."""
    tokens = [64, 128, 256, 512, 1024, 2048, 4096]
    used = [max(100 * t, 0.1 * t * t) for t in tokens]
    found = fit_prefill(tokens, used)
    assert found.linear == pytest.approx(100, rel=0.02)
    assert 512 <= found.bend < 2048
    assert found(3000) == pytest.approx(0.1 * 3000**2, rel=0.05)
    assert found(100) == pytest.approx(10_000, rel=0.02)


def test_a_prefill_that_takes_less_per_token_does_not_bend():
    found = fit_prefill([64, 512], [1000 + 6400, 1000 + 51200])
    assert found.bend is None
    assert found.error < 0.08


@pytest.mark.parametrize("tokens, used", [([], []), ([0], [5]), ([5], [0])])
def test_prefills_without_samples(tokens, used):
    with pytest.raises(ValueError, match="above 0"):
        fit_prefill(tokens, used)


# Pages


def test_bytes_per_token_of_two_pools():
    few = memory(burst(1, 0, 0).bucket, 0, arguments=5_000)
    many = memory(burst(1, 0, 0).bucket, 0, arguments=21_000)
    assert bytes_per_token(few, many, more_tokens=160) == 100
    with pytest.raises(ValueError, match="smaller pool first"):
        bytes_per_token(many, few, more_tokens=160)


def test_a_plan_counted_by_hand():
    """1 MB free, 100 bytes per token, 4 rows of 5,000 tokens, a step of 200 kB."""
    plan = plan_memory(
        limits(max_context=5000), 100, [burst(4, 3, 200_000), prefill(4, 10, 50_000)]
    )
    # 800 kB are left for 8,000 tokens, among which 200 kB are shared: 25 bytes each.
    assert plan.next_token == pytest.approx(125)
    assert plan.next_token_input == 100
    assert plan.num_pages == 800
    assert plan.weight_limit == 800_000
    assert plan.gate_tokens == int(0.75 * 800_000 / 125) == 4800
    assert plan.most_tokens == 6400
    assert plan.rows_of_context(2000, most_rows=4) == 3
    assert plan.rows_of_context(100, most_rows=4) == 4
    assert plan.may_speculate(4800)
    assert not plan.may_speculate(4801)
    assert plan.weight(10) == pytest.approx(1250)
    assert plan.prefill.linear == pytest.approx((50_000 + 4000) / 40)
    # 36 tokens at page ends are 0.45 % of what is free; rounded up, and 5 points.
    assert plan.recommended_batch_safety_margin == 6
    assert plan.warnings == ()


def test_steps_that_copy_the_pool_halve_it():
    """Twice the bytes per token of the pool, of which half lie there between steps."""
    asked = limits(max_context=5000)
    plan = plan_memory(asked, 100, [burst(4, 3, 200_000)], copied_per_token=100)
    assert plan.num_pages == 400
    assert plan.bytes_per_token == plan.next_token_input == 100
    assert plan.next_token == pytest.approx(250)
    assert plan.gate_tokens == 2400


def test_rows_that_cannot_fill_the_memory_get_no_more_pages_than_they_can_hold():
    plan = plan_memory(limits(max_context=95), 100, [burst(4, 0, 1000)])
    assert plan.num_pages == 4 * 10
    assert plan.recommended_batch_safety_margin == SAFETY_POINTS


def test_rows_have_room_for_a_tree_past_their_last_token():
    chains, trees = limits(max_context=95), limits(max_context=95, tree_slots=12)
    assert chains.pages_per_row == 10
    assert trees.pages_per_row == 11
    assert plan_memory(trees, 100, [burst(4, 0, 1000)]).num_pages == 4 * 11
    # 4 x (9 + 160) tokens of 8,000 are 8.45 %; rounded up, and 5 points.
    plan = plan_memory(limits(max_context=5000, tree_slots=160), 100, [burst(4, 3, 200_000)])
    assert plan.num_pages == 800
    assert plan.recommended_batch_safety_margin == 5 + 9


def test_rows_take_whole_pages_and_room_for_a_tree():
    steps = [burst(4, 3, 200_000)]
    few = plan_memory(limits(max_context=5000, num_pages=30), 100, steps)
    assert few.most_tokens == 300
    assert few.rows_of_context(100, most_rows=4) == 3
    assert few.rows_of_context(91, most_rows=4) == 3
    assert few.rows_of_context(74, most_rows=4) == 3  # 8 pages each
    trees = limits(max_context=5000, num_pages=30, tree_slots=9)
    assert plan_memory(trees, 100, steps).rows_of_context(100, most_rows=4) == 2
    assert plan_memory(trees, 100, steps).rows_of_context(61, most_rows=4) == 4


def test_a_prefill_larger_than_every_burst_leaves_fewer_pages():
    """XLA's pool lies there while a prefill runs: what prefills take is not for pages."""
    small = plan_memory(limits(max_context=5000), 100, [burst(4, 0, 200_000)])
    large = plan_memory(
        limits(max_context=5000),
        100,
        [burst(4, 0, 200_000), prefill(1, 50, 600_000)],
    )
    assert small.num_pages == 800
    assert large.num_pages == 400
    # A batch of the weight limit no longer finds pages: the margin says by how much.
    assert large.recommended_batch_safety_margin == 5 + 51
    assert "below the 56 percent" in large.warnings[0]


def test_the_user_has_the_last_word_on_pages():
    plan = plan_memory(limits(max_context=5000, num_pages=900), 100, [burst(4, 0, 200_000)])
    assert plan.num_pages == 900
    assert "800 that fit" in plan.warnings[0]
    few = plan_memory(limits(num_pages=3), 100, [burst(4, 0, 200_000)])
    assert few.num_pages == 3
    assert few.most_tokens == 30
    # Pages run out long before weight does.
    assert few.gate_tokens == int(0.75 * 30)


def test_rows_that_cannot_fill_the_pool_are_gated_by_weight():
    """As many pages as all rows can hold are never short."""
    plan = plan_memory(limits(max_context=95), 100, [burst(4, 0, 1000)])
    weight = 0.75 * plan.weight_limit / plan.next_token
    assert plan.gate_tokens == int(weight) > plan.num_pages * plan.page_size


def test_few_rows_of_short_contexts_pay_most_per_token():
    short = next_token_coefficient(limits(), 100, [burst(1, 0, 50_000), burst(4, 0, 60_000)])
    assert short == pytest.approx(100 + 50_000 / 1000)


def test_what_a_device_was_seen_to_take_counts_where_it_is_more():
    assert larger_of(5, None) == 5
    assert larger_of(5, 4) == 5
    assert larger_of(5, 6) == 6
    buckets = [burst(4, 0, 200_000)]
    asked = limits(max_context=5000)
    seen = plan_memory(asked, 100, buckets, measured_workspace=400_000)
    assert seen.num_pages == 600
    assert seen.next_token == pytest.approx(100 + 400_000 / 6000)
    less = plan_memory(asked, 100, buckets, measured_workspace=100_000)
    assert less == plan_memory(asked, 100, buckets)


# Guards


def test_no_page_takes_less_than_its_keys_and_values():
    warnings = []
    assert pages_ratio(90.0, 100.0, warnings) == 1.0
    assert "below the 100.0" in warnings[0]
    assert pages_ratio(110.0, 100.0, warnings) == pytest.approx(1.1)
    assert pages_ratio(100.0, 100.0, warnings) == 1.0
    assert len(warnings) == 1


@pytest.mark.parametrize("linear", [100.0, 99.0])
def test_a_prefill_of_nothing_but_pages_asks_for_no_margin(linear):
    percent = recommended_margin(
        bytes_per_token=100,
        next_token=125,
        prefill=PrefillCoefficients(linear),
        prefill_workspace=10**9,
        limits=limits(max_context=100_000),
        num_pages=10**6,
    )
    assert percent == SAFETY_POINTS


def test_the_margin_of_the_source_where_chunks_bound_nothing():
    """Ratios 0.8 and 0.7: 1 - 0.2 / 0.3 is 33.3 percent, and 5 points on top."""
    percent = recommended_margin(
        bytes_per_token=80,
        next_token=100,
        prefill=PrefillCoefficients(80 / 0.7),
        prefill_workspace=10**9,
        limits=limits(),
        num_pages=1000,
    )
    assert percent == 5 + 34


def test_a_margin_is_never_all():
    percent = recommended_margin(
        bytes_per_token=100,
        next_token=100,
        prefill=PrefillCoefficients(10**6),
        prefill_workspace=10**9,
        limits=limits(rows=1000, max_context=10**6),
        num_pages=1000,
    )
    assert percent == MOST_MARGIN


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(free_bytes=0), "leave no memory"),
        (dict(batch_safety_margin=100), "percentage"),
        (dict(batch_safety_margin=-1), "percentage"),
        (dict(speculation_weight_fraction=0), "above 0"),
        (dict(speculation_weight_fraction=1.1), "at most 1"),
    ],
)
def test_limits_that_mean_nothing(changes, message):
    with pytest.raises(ValueError, match=message):
        limits(**changes)


def test_steps_that_leave_no_page():
    with pytest.raises(ValueError, match="no room for a page"):
        plan_memory(limits(), 100, [burst(4, 0, 999_500)])
    with pytest.raises(ValueError, match="no decoding step"):
        plan_memory(limits(), 100, [prefill(1, 10, 5)])


@given(
    free=st.integers(10**6, 10**10),
    c=st.integers(1, 10**4),
    rows=st.integers(1, 300),
    context=st.integers(16, 10**5),
    decode=st.integers(0, 9 * 10**5),
    prompts=st.integers(0, 9 * 10**5),
    margin=st.integers(0, 94),
)
@settings(max_examples=300, deadline=None)
def test_what_is_planned_fits(free, c, rows, context, decode, prompts, margin):
    """Pool and steps fit; from the recommended margin on, so do a full batch's page ends."""
    asked = MemoryLimits(
        free_bytes=free,
        page_size=16,
        rows=rows,
        max_context=context,
        batch_safety_margin=margin,
    )
    buckets = [burst(rows, 2, decode), prefill(1, 64, prompts)]
    try:
        plan = plan_memory(asked, c, buckets)
    except ValueError:
        assert free - max(decode, prompts) < 16 * c
        return
    assert plan.num_pages * 16 * c + max(decode, prompts) <= free
    assert plan.next_token >= c
    assert plan.weight(plan.gate_tokens) <= 0.75 * plan.weight_limit * (1 + 1e-9)
    if margin >= plan.recommended_batch_safety_margin:
        # Every row but its last page is full; a row of one token more takes a page more.
        tokens = min(int(plan.weight_limit / plan.next_token), rows * context)
        pages = min((tokens + 15 * rows) // 16, rows * -(-context // 16))
        assert pages <= plan.num_pages
