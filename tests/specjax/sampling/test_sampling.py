"""Processed logits, choices and logprobs against sorting and counting in numpy."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import sampling as sampling_lib
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.sampling import RowSampling, processing, row_values, seeded_noise

VOCAB = 97
# Most tests share these sizes, hence one compilation.
ROWS = 4
NUM_TOKENS = 8
MAX_LENGTH = 24
PROMPT_LENGTH = 5
EOS = (90,)
ENGINE = EngineConfig(max_bias_entries=6, max_allowed_tokens=5, max_stop_tokens=4, max_logprobs=3)

process = jax.jit(sampling_lib.process_logits)
choose = jax.jit(sampling_lib.choose_tokens)
score = jax.jit(sampling_lib.token_logprobs, static_argnames="max_logprobs")
choose_and_score = jax.jit(sampling_lib.choose_and_score, static_argnames="max_logprobs")


def rows_of(*params, seeds=None):
    """RowSampling with one row per SamplingParams, greedy rows after them."""
    params += (SamplingParams(temperature=0, ignore_eos=True),) * (ROWS - len(params))
    fields = [
        row_values(
            one,
            prompt_length=PROMPT_LENGTH,
            eos_token_ids=EOS,
            seed=index if seeds is None else seeds[index],
            engine_config=ENGINE,
        )
        for index, one in enumerate(params)
    ]
    return RowSampling(
        **{name: jnp.asarray(np.stack([f[name] for f in fields])) for name in fields[0]}
    )


@dataclasses.dataclass
class Case:
    """Flat tokens of some rows, with random logits and a history full of duplicates."""

    sampling: RowSampling
    logits: jax.Array
    row_ids: jax.Array
    positions: jax.Array
    history: jax.Array

    @property
    def args(self):
        return (
            self.logits,
            self.sampling,
            self.row_ids,
            self.positions,
            self.history,
        )

    def processed(self):
        return np.asarray(process(*self.args))


def make_case(*params, num_tokens=NUM_TOKENS, vocab=VOCAB, scale=3.0, seed=0, positions=None):
    rng = np.random.default_rng(seed)
    if positions is None:
        positions = rng.integers(PROMPT_LENGTH, MAX_LENGTH - 2, num_tokens)
    history = rng.integers(0, max(vocab // 4, 1), (ROWS, MAX_LENGTH))
    return Case(
        rows_of(*params),
        jnp.asarray(rng.normal(0, scale, (num_tokens, vocab)), jnp.float32),
        jnp.asarray(np.sort(np.arange(num_tokens) % len(params)), jnp.int32),
        jnp.asarray(positions, jnp.int32),
        jnp.asarray(history, jnp.int32),
    )


def reference(logits, params, history, position, prompt_length=PROMPT_LENGTH):
    """The processed logits of one node, step by step and with a sort."""
    x = np.array(logits, np.float64)
    output = [int(t) for t in history[prompt_length : position + 1]]
    seen = {int(t) for t in history[: position + 1]}
    if params.allowed_token_ids is not None:
        for token in set(range(len(x))) - set(params.allowed_token_ids):
            x[token] = -np.inf
    for token in params.bad_token_ids:
        x[token] = -np.inf
    for token, value in params.logit_bias.items():
        x[token] += value
    if position + 1 - prompt_length < params.min_tokens:
        for token in (*params.stop_token_ids, *(() if params.ignore_eos else EOS)):
            x[token] = -np.inf
    params = params.filled({})
    r = params.repetition_penalty
    for token in seen:
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in output:
        x[token] -= params.frequency_penalty
    for token in set(output):
        x[token] -= params.presence_penalty
    if params.temperature == 0:
        return x
    x = (x - x.max()) / params.temperature
    x[np.exp(x) < params.min_p] = -np.inf
    if 0 < params.top_k < len(x):
        x[x < np.sort(x)[-params.top_k]] = -np.inf
    if params.top_p < 1:
        order = np.argsort(-x, kind="stable")
        p = np.exp(x[order]) / np.exp(x).sum()
        num_kept = int(np.sum(np.cumsum(p) - p < params.top_p))
        x[x < x[order[num_kept - 1]]] = -np.inf
    return x


def assert_matches(case, params):
    actual = case.processed()
    for index, row in enumerate(np.asarray(case.row_ids)):
        expected = reference(
            np.asarray(case.logits[index]),
            params[row],
            np.asarray(case.history[row]),
            int(case.positions[index]),
        )
        is_out = np.isneginf(expected)
        np.testing.assert_array_equal(np.isneginf(actual[index]), is_out)
        # float32 against float64, values up to a few tens.
        np.testing.assert_allclose(actual[index][~is_out], expected[~is_out], rtol=1e-5, atol=2e-5)


FEATURES = {
    "neutral": {},
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.6},
    "allowed": {"allowed_token_ids": (3, 5, 96)},
    "bad": {"bad_token_ids": (0, 96)},
    "bias": {"logit_bias": {0: 3.5, 96: -2.0, 7: -np.inf}},
    "bias_and_bad_on_one_token": {"logit_bias": {4: 9.0}, "bad_token_ids": (4,)},
    "min_tokens": {"min_tokens": 8, "stop_token_ids": (1, 2)},
    "min_tokens_ignoring_eos": {"min_tokens": 64, "ignore_eos": True},
    "repetition": {"repetition_penalty": 1.7},
    "repetition_below_one": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 0.9},
    "frequency": {"frequency_penalty": -0.4},
    "min_p": {"min_p": 0.05},
    "min_p_one": {"min_p": 1.0},
    "top_k": {"top_k": 7},
    "top_k_one": {"top_k": 1},
    "top_k_whole_vocabulary": {"top_k": VOCAB},
    "top_k_past_vocabulary": {"top_k": 2**31 - 1},
    "top_p": {"top_p": 0.8},
    "top_p_tiny": {"top_p": 1e-6},
    "top_p_near_one": {"top_p": 0.9999},
    "penalties_at_temperature_zero": {
        "temperature": 0,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.2,
        "top_k": 2,
    },
    "all": {
        "temperature": 0.7,
        "allowed_token_ids": (3, 5, 20, 60, 90),
        "bad_token_ids": (5,),
        "logit_bias": {3: 0.5, 20: 1.0},
        "min_tokens": 9,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "min_p": 0.01,
        "top_k": 3,
        "top_p": 0.9,
    },
}


@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_matches_reference(name):
    params = [SamplingParams(**FEATURES[name])] * 4
    assert_matches(make_case(*params), params)


def test_rows_of_one_batch_do_not_mix():
    params = [SamplingParams(**feature) for feature in FEATURES.values()]
    for start in range(0, len(params), 4):
        mixed = params[start : start + 4]
        assert_matches(make_case(*mixed, seed=start), mixed)


def test_random_combinations_match_a_sort():
    rng = np.random.default_rng(3)

    def draw():
        return SamplingParams(
            temperature=float(rng.choice([0.0, 0.5, 1.0, 1.5])),
            top_k=int(rng.choice([0, 1, 5, 40, 2000])),
            top_p=float(rng.choice([1.0, 0.95, 0.5])),
            min_p=float(rng.choice([0.0, 0.02])),
            repetition_penalty=float(rng.choice([1.0, 1.2])),
            presence_penalty=float(rng.choice([0.0, 0.5])),
            frequency_penalty=float(rng.choice([0.0, 0.3])),
            logit_bias={int(t): 1.5 for t in rng.integers(0, 1009, 2)},
        )

    for seed in range(6):
        params = [draw() for _ in range(4)]
        case = make_case(*params, vocab=1009, scale=2.0, seed=seed)
        actual = case.processed()
        for index, row in enumerate(np.asarray(case.row_ids)):
            node = (np.asarray(case.history[row]), int(case.positions[index]))
            logits = np.asarray(case.logits[index])
            expected = reference(logits, params[row], *node)
            differs = np.isneginf(actual[index]) != np.isneginf(expected)
            # Only a token at the edge of the nucleus may fall on the other side.
            slack = [
                reference(
                    logits,
                    dataclasses.replace(params[row], top_p=top_p),
                    *node,
                )
                for top_p in np.clip(params[row].top_p + np.array([-1e-5, 1e-5]), 0, 1)
            ]
            at_edge = np.isneginf(slack[0]) != np.isneginf(slack[1])
            assert not np.any(differs & ~at_edge)
            both = np.isfinite(actual[index]) & np.isfinite(expected)
            np.testing.assert_allclose(actual[index][both], expected[both], rtol=1e-5, atol=2e-5)


def test_penalties_of_a_node_see_its_drafted_ancestors():
    params = SamplingParams(
        temperature=0, presence_penalty=1.0, frequency_penalty=0.25, min_tokens=3
    )
    case = make_case(params, positions=[5, 6, 7, 8] * 2)
    history = case.history.at[0, :10].set(jnp.arange(30, 40)).at[0, 7].set(36)
    case = dataclasses.replace(case, logits=jnp.zeros_like(case.logits), history=history)
    processed = case.processed()[:4]
    # The output starts at position 5; tokens 35, 36, 36, 38 stand at 5 to 8.
    expected = np.zeros((4, VOCAB))
    expected[0:, 35] = -1.25
    expected[1:, 36] = [-1.25, -1.5, -1.5]
    expected[3:, 38] = -1.25
    expected[:2, EOS[0]] = -np.inf  # one and two tokens of output so far
    np.testing.assert_array_equal(processed, expected)


def test_history_past_the_prefix_and_padding_are_not_read():
    params = SamplingParams(temperature=0.9, repetition_penalty=2.0, frequency_penalty=1.0)
    case = make_case(params, positions=[2, 3, 4, 5, 6, 7, 8, 9])
    clean = case.processed()
    place = jnp.arange(MAX_LENGTH)[None, :]
    for filler in (-1, 2**30, 3):
        dirty = jnp.where(place > 9, filler, case.history)
        np.testing.assert_array_equal(dataclasses.replace(case, history=dirty).processed(), clean)


def test_negative_and_too_large_ids_in_the_history_are_no_tokens():
    params = SamplingParams(temperature=0, repetition_penalty=2.0, presence_penalty=1.0)
    case = make_case(params)
    case = dataclasses.replace(case, history=jnp.full_like(case.history, -1))
    np.testing.assert_array_equal(case.processed(), case.logits)
    case = dataclasses.replace(case, history=jnp.full_like(case.history, VOCAB))
    np.testing.assert_array_equal(case.processed(), case.logits)


def test_ties_at_a_threshold_are_all_kept():
    logits = jnp.zeros((NUM_TOKENS, VOCAB)).at[:, 10:14].set(2.0).at[:, 20].set(3.0)
    params = [SamplingParams(top_k=2), SamplingParams(top_p=0.3)]
    case = dataclasses.replace(make_case(*params), logits=logits)
    for kept in np.isfinite(case.processed()):
        assert set(np.flatnonzero(kept)) == {10, 11, 12, 13, 20}


def with_probs(case, *probs):
    """The case with the same few probabilities at every node, 0 for other tokens."""
    logits = np.full((NUM_TOKENS, VOCAB), -np.inf, np.float32)
    logits[:, : len(probs)] = np.log(probs)
    return dataclasses.replace(case, logits=jnp.asarray(logits))


def test_top_p_keeps_the_least_set_that_reaches_it():
    limits = {0.4: 1, 0.52: 2, 0.74: 2, 0.76: 4}
    case = make_case(*[SamplingParams(top_p=top_p) for top_p in limits])
    processed = with_probs(case, 0.5, 0.25, 0.125, 0.125).processed()
    assert np.isfinite(processed).sum(axis=1)[::2].tolist() == list(limits.values())


def test_min_p_comes_before_top_p():
    # min_p removes the last of them, so 0.65 of what is left needs only one.
    case = make_case(SamplingParams(top_p=0.65), SamplingParams(top_p=0.65, min_p=0.2))
    processed = with_probs(case, 0.6, 0.3, 0.1).processed()
    assert np.isfinite(processed).sum(axis=1)[::4].tolist() == [2, 1]


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 100.0])
def test_extreme_temperatures_stay_finite(temperature):
    params = SamplingParams(temperature=temperature, top_p=0.9, top_k=50)
    case = make_case(params, scale=30.0)
    assert not np.any(np.isnan(case.processed()))
    choice = choose(*case.args)
    assert not np.any(choice.is_invalid)
    if temperature < 1e-2:
        np.testing.assert_array_equal(choice.token_ids, case.logits.argmax(axis=1))


@pytest.mark.parametrize(
    "feature",
    [{"temperature": 0}, {}, {"top_p": 0.9, "top_k": 9}, {"repetition_penalty": 1.1}],
)
def test_bad_logits_are_flagged_and_touch_no_other_node(feature):
    case = make_case(*[SamplingParams(**feature)] * 4)
    clean = choose(*case.args)
    bad = case.logits.at[1, 50].set(jnp.nan).at[2].set(-jnp.inf)
    bad = bad.at[4, 3].set(jnp.inf).at[6, 96].set(jnp.nan)
    case = dataclasses.replace(case, logits=bad)
    choice = choose(*case.args)
    expected = np.isin(np.arange(8), [1, 2, 4, 6])
    np.testing.assert_array_equal(choice.is_invalid, expected)
    np.testing.assert_array_equal(choice.token_ids[~expected], clean.token_ids[~expected])
    assert np.all((choice.token_ids >= 0) & (choice.token_ids < VOCAB))
    probs = sampling_lib.target_probs(process(*case.args), case.sampling, case.row_ids)
    np.testing.assert_allclose(probs.sum(axis=1), 1, rtol=1e-5)


def test_nan_of_a_token_that_is_not_allowed_is_flagged():
    params = SamplingParams(allowed_token_ids=(3, 5))
    case = make_case(params)
    case = dataclasses.replace(case, logits=case.logits.at[2, 50].set(jnp.nan))
    assert np.flatnonzero(choose(*case.args).is_invalid).tolist() == [2]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    "feature",
    [
        {"allowed_token_ids": (3, 5)},
        {"min_tokens": 60},
        {"logit_bias": {EOS[0]: -50.0}},
        {"bad_token_ids": EOS},
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
    ],
    ids=lambda feature: next(iter(feature)),
)
def test_bad_logits_are_flagged_in_greedy_rows_that_edit_them(feature, bad):
    """Where no row is random the logits are not looked at again: edits must not hide it."""
    case = make_case(SamplingParams(temperature=0, **feature))
    history = case.history.at[:, PROMPT_LENGTH].set(EOS[0])  # penalties know it
    logits = case.logits.at[2, EOS[0]].set(bad)
    case = dataclasses.replace(case, logits=logits, history=history)
    assert np.flatnonzero(choose(*case.args).is_invalid).tolist() == [2]


def test_nothing_left_to_choose_is_flagged():
    params = [
        SamplingParams(allowed_token_ids=(3,), logit_bias={3: -1.0}),
        SamplingParams(allowed_token_ids=EOS, temperature=0),
        SamplingParams(allowed_token_ids=(3,)),
    ]
    case = make_case(*params)
    # Refused when they are asked for, so written past the check.
    sampling = dataclasses.replace(
        case.sampling,
        bias_values=case.sampling.bias_values.at[0, 0].set(-np.inf),
        min_tokens=case.sampling.min_tokens.at[1].set(60),
    )
    choice = choose(*dataclasses.replace(case, sampling=sampling).args)
    assert choice.is_invalid.tolist() == [True] * 6 + [False] * 2
    assert choice.token_ids[6:].tolist() == [3, 3]


def test_logits_of_negative_infinity_are_never_chosen():
    case = make_case(SamplingParams(temperature=5.0), SamplingParams(temperature=0))
    logits = jnp.full_like(case.logits, -jnp.inf).at[:, 96].set(-50.0)
    choice = choose(*dataclasses.replace(case, logits=logits).args)
    assert choice.token_ids.tolist() == [96] * NUM_TOKENS
    assert not np.any(choice.is_invalid)


@pytest.mark.parametrize("vocab", [1, 3, 127, 128, 129, 1000])
def test_first_argmax_takes_the_lowest_of_equals(vocab):
    first_argmax = jax.jit(sampling_lib.first_argmax)
    rng = np.random.default_rng(vocab)
    values = rng.integers(0, 3, (20, vocab)).astype(np.float32)
    token_ids, largest = first_argmax(jnp.asarray(values))
    np.testing.assert_array_equal(token_ids, values.argmax(axis=1))
    np.testing.assert_array_equal(largest, values.max(axis=1))
    last = np.full((2, vocab), -np.inf, np.float32)
    last[1, -1] = -3.0
    token_ids, _ = first_argmax(jnp.asarray(last))
    assert token_ids.tolist() == [0, vocab - 1]


def test_padding_row_ids_are_clamped():
    case = make_case(SamplingParams(top_p=0.5), SamplingParams(min_tokens=30))
    row_ids = case.row_ids.at[3:].set(ROWS)
    case = dataclasses.replace(case, row_ids=row_ids, positions=case.positions * 1000)
    assert not np.any(choose(*case.args).is_invalid)


def test_choice_does_not_depend_on_the_batch():
    """A row alone, among others with features, or given processed logits: the same token."""
    plain = SamplingParams(temperature=0.8)
    busy = SamplingParams(top_p=0.9, repetition_penalty=1.2, logit_bias={1: 2.0})
    seeds = [7, 8, 9, 10]
    case = make_case(*[plain] * 4, num_tokens=64, positions=np.arange(64) % 20 + 2)
    case.sampling = rows_of(*[plain] * 4, seeds=seeds)
    alone = choose(*case.args).token_ids
    mixed = dataclasses.replace(case, sampling=rows_of(plain, plain, busy, busy, seeds=seeds))
    np.testing.assert_array_equal(choose(*mixed.args).token_ids[:32], alone[:32])
    processed = process(*mixed.args)
    again = choose(*mixed.args, processed=processed)
    np.testing.assert_array_equal(again.token_ids, choose(*mixed.args).token_ids)
    reverse = jnp.arange(63, -1, -1)
    turned = dataclasses.replace(
        case,
        logits=case.logits[reverse],
        row_ids=case.row_ids[reverse],
        positions=case.positions[reverse],
    )
    np.testing.assert_array_equal(choose(*turned.args).token_ids[reverse], alone)
    assert len(set(np.asarray(alone).tolist())) > 10


def test_choice_depends_on_seed_position_and_role():
    case = make_case(SamplingParams(), SamplingParams(), num_tokens=64)
    positions = jnp.arange(64, dtype=jnp.int32) % 32
    case = dataclasses.replace(case, positions=positions, logits=jnp.zeros_like(case.logits))
    target = np.asarray(choose(*case.args).token_ids)
    draft = np.asarray(choose(*case.args, role=seeded_noise.DRAFT).token_ids)
    assert np.mean(target[:32] == target[32:]) < 0.2  # two seeds
    assert np.mean(target == draft) < 0.2
    assert np.mean(target[:-1] == target[1:]) < 0.2


@pytest.mark.full
def test_choice_follows_target_probs():
    """200k draws of a filtered distribution: within 5 standard errors, nothing outside."""
    case = make_case(SamplingParams(temperature=0.7, top_k=12, top_p=0.95), scale=1.5)
    count, chunks = 20_000, 10
    row_ids = jnp.zeros(count, jnp.int32)
    logits = jnp.tile(case.logits[:1], (count, 1))
    processed = jnp.tile(process(*case.args)[:1], (count, 1))
    counts = np.zeros(VOCAB)
    for chunk in range(chunks):
        positions = jnp.arange(count, dtype=jnp.int32) + chunk * count
        choice = choose(
            logits,
            case.sampling,
            row_ids,
            positions,
            case.history,
            processed=processed,
        )
        counts += np.bincount(choice.token_ids, minlength=VOCAB)
    probs = np.asarray(sampling_lib.target_probs(processed[:1], case.sampling, row_ids[:1]))[0]
    total = count * chunks
    error = np.sqrt(probs * (1 - probs) / total)
    assert np.all(counts[probs == 0] == 0)
    assert np.all(np.abs(counts / total - probs) <= 5 * error)


def test_target_probs_are_a_softmax_or_one_hot():
    case = make_case(SamplingParams(top_k=4), SamplingParams(temperature=0))
    processed = process(*case.args)
    probs = np.asarray(sampling_lib.target_probs(processed, case.sampling, case.row_ids))
    np.testing.assert_allclose(probs.sum(axis=1), 1, rtol=1e-6)
    assert np.all((probs[:4] > 0).sum(axis=1) == 4)
    np.testing.assert_array_equal(
        probs[4:], np.eye(VOCAB)[np.asarray(case.logits[4:]).argmax(axis=1)]
    )


def log_softmax(x):
    shifted = np.asarray(x, np.float64) - np.max(x, axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def test_logprobs():
    params = [
        SamplingParams(temperature=0.5, top_k=2, logprobs=3),
        SamplingParams(temperature=0, presence_penalty=1.0, logprobs=0),
        SamplingParams(),
    ]
    case = make_case(*params)
    token_ids = choose(*case.args).token_ids
    actual = score(case.logits, token_ids, *case.args[1:], max_logprobs=3)
    raw, processed = log_softmax(case.logits), log_softmax(case.processed())
    node = np.arange(NUM_TOKENS)
    np.testing.assert_allclose(actual.raw, raw[node, token_ids], atol=1e-5)
    np.testing.assert_allclose(actual.processed, processed[node, token_ids], atol=1e-5)
    for values, ids, top in (
        (raw, actual.raw_top_ids, actual.raw_top),
        (processed, actual.processed_top_ids, actual.processed_top),
    ):
        assert ids.shape == top.shape == (NUM_TOKENS, 3)
        np.testing.assert_allclose(top, -np.sort(-values, axis=1)[:, :3], atol=1e-5)
        finite = np.isfinite(top)
        at = np.take_along_axis(values, np.asarray(ids), axis=1)
        np.testing.assert_allclose(at[finite], np.asarray(top)[finite], atol=1e-5)
    assert np.all(np.isneginf(actual.processed_top[:2, 2]))  # top_k left two

    given = score(
        case.logits,
        token_ids,
        *case.args[1:],
        max_logprobs=3,
        processed=process(*case.args),
    )
    chex.assert_trees_all_close(given, actual, atol=1e-6)
    choice, together = choose_and_score(*case.args, max_logprobs=3)
    np.testing.assert_array_equal(choice.token_ids, token_ids)
    chex.assert_trees_all_close(together, actual, atol=1e-6)


PLAIN = {
    "greedy": SamplingParams(temperature=0, logprobs=2, entropy=True),
    "temperature": SamplingParams(temperature=0.7, logprobs=2, entropy=True),
    "checked": SamplingParams(temperature=1.0, logprobs=0, self_check=True),
}


@pytest.mark.parametrize(
    "edit",
    [
        {"logit_bias": {7: 1.5}, "repetition_penalty": 1.2},
        {"allowed_token_ids": (5, 9, 96)},
        {"min_tokens": 60},
    ],
    ids=lambda edit: next(iter(edit)),
)
def test_an_edited_greedy_row_does_not_notice_a_random_one(edit):
    """To the bit: without a random row in the batch its logits take another way."""
    edited = SamplingParams(temperature=0, logprobs=2, entropy=True, **edit)
    alone = make_case(edited, edited)
    random = SamplingParams(temperature=0.5, top_k=2, logprobs=3, entropy=True)
    company = dataclasses.replace(alone, sampling=rows_of(edited, random))
    own = np.flatnonzero(np.asarray(alone.row_ids) == 0)
    at = lambda tree: jax.tree.map(lambda leaf: np.asarray(leaf)[own], tree)
    here, beside = (choose_and_score(*case.args, max_logprobs=3) for case in (alone, company))
    chex.assert_trees_all_equal(at(here[0]), at(beside[0]))
    told = [at(scored)._asdict() for _, scored in (here, beside)]
    for name in (n for n in told[0] if "top" not in n):
        np.testing.assert_array_equal(told[0][name], told[1][name])


@pytest.mark.parametrize("params", PLAIN.values(), ids=PLAIN)
def test_logprobs_of_a_plain_row_are_those_of_the_scaled_logits_in_any_company(params):
    """To the bit: neither their logits nor their sums are those of the edited rows."""
    alone = make_case(params, params)
    edited = SamplingParams(temperature=0.5, top_k=2, logit_bias={3: 2.0}, logprobs=3, entropy=True)
    company = dataclasses.replace(alone, sampling=rows_of(params, edited))
    choice, told = choose_and_score(*alone.args, max_logprobs=3)
    beside_choice, beside = choose_and_score(*company.args, max_logprobs=3)
    own = np.flatnonzero(np.asarray(alone.row_ids) == 0)
    assert 0 < len(own) < NUM_TOKENS
    at = lambda tree: jax.tree.map(lambda leaf: np.asarray(leaf)[own], tree)
    chex.assert_trees_all_equal(at(choice), at(beside_choice))
    for name in (n for n in told._fields if "top" not in n):
        np.testing.assert_array_equal(at(told)._asdict()[name], at(beside)._asdict()[name])

    processed = log_softmax(alone.processed())
    node = np.arange(NUM_TOKENS)
    expected = processed[node, choice.token_ids]
    np.testing.assert_allclose(told.processed, expected, atol=1e-5)
    if params.filled({}).temperature:
        np.testing.assert_array_equal(told.processed, told.tempered)
    if params.entropy:
        entropy = -np.sum(np.exp(processed) * processed, axis=1)
        np.testing.assert_allclose(told.entropy, entropy, atol=1e-5)
    if params.logprobs:
        top = -np.sort(-processed, axis=1)[:, :3]
        np.testing.assert_allclose(told.processed_top, top, atol=1e-5)
    edited_processed = log_softmax(company.processed())
    others = np.setdiff1d(node, own)
    expected = edited_processed[others, np.asarray(beside_choice.token_ids)[others]]
    np.testing.assert_allclose(beside.processed[others], expected, atol=1e-5)


def test_a_low_temperature_keeps_its_precision():
    """Logits of 500 over 0.01 are known to 0.004 only; less the largest, to far more."""
    case = make_case(SamplingParams(temperature=0.01, logprobs=0))
    case = dataclasses.replace(case, logits=500 + case.logits / 64)
    choice, told = choose_and_score(*case.args, max_logprobs=1)
    exact = log_softmax(np.asarray(case.logits, np.float64) / np.float32(0.01))
    expected = exact[np.arange(NUM_TOKENS), choice.token_ids]
    np.testing.assert_allclose(told.tempered, expected, atol=2e-5)


def test_logprobs_are_zeros_unless_asked_for():
    case = make_case(SamplingParams(), SamplingParams())
    token_ids = choose(*case.args).token_ids
    actual = score(case.logits, token_ids, *case.args[1:], max_logprobs=3)
    assert not any(np.any(field) for field in actual)
    chosen_only = make_case(SamplingParams(logprobs=0), SamplingParams())
    actual = score(chosen_only.logits, token_ids, *chosen_only.args[1:], max_logprobs=3)
    assert np.all(actual.raw < 0)
    assert not np.any(actual.raw_top)


@pytest.mark.full
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7, self_check=True),
        SamplingParams(top_k=3, bad_token_ids=[0], self_check=True),
    ],
    ids=["all", "few"],
)
def test_the_surplus_of_a_draw_has_mean_zero_and_the_variance_it_says(params):
    """By exact expectation: each token in turn, weighted with its probability."""
    case = make_case(params, vocab=5)
    log_probs = np.asarray(log_softmax(case.processed()), np.float64)
    probs = np.exp(log_probs)
    told = [
        score(
            case.logits,
            jnp.full(NUM_TOKENS, token),
            *case.args[1:],
            max_logprobs=1,
        )
        for token in range(5)
    ]
    surplus = np.stack([np.asarray(each.surplus) for each in told], axis=1)
    surplus = np.where(probs > 0, surplus, 0.0)
    np.testing.assert_allclose(np.sum(probs * surplus, axis=1), 0, atol=1e-6)
    moment = np.sum(probs * surplus**2, axis=1)
    for each in told:
        np.testing.assert_allclose(each.variance, moment, atol=1e-6)
    entropy = -np.sum(probs * np.where(probs > 0, log_probs, 0.0), axis=1)
    expected = np.where(probs > 0, log_probs + entropy[:, None], 0.0)
    np.testing.assert_allclose(surplus, expected, atol=1e-6)


def test_max_logprobs_above_the_vocabulary():
    case = make_case(SamplingParams(logprobs=3), vocab=2)
    given = {"max_logprobs": 3, "processed": case.logits}
    actual = score(case.logits, case.row_ids, *case.args[1:], **given)
    assert np.isfinite(actual.raw_top).tolist() == [[True, True, False]] * NUM_TOKENS


def test_features_toggle_without_recompiling():
    traced = jax.jit(chex.assert_max_traces(sampling_lib.process_logits, n=1))
    chex.clear_trace_counter()
    for feature in FEATURES.values():
        traced(*make_case(*[SamplingParams(**feature)] * 4).args)
    case = make_case(SamplingParams())
    case = dataclasses.replace(case, sampling=RowSampling.empty(ROWS, ENGINE))
    np.testing.assert_array_equal(traced(*case.args), case.logits)


def test_runs_inside_a_loop():
    case = make_case(SamplingParams(top_p=0.9), SamplingParams(top_k=3))

    @jax.jit
    def run(logits):
        def body(index, total):
            shifted = logits + index.astype(jnp.float32)
            return total + sampling_lib.choose_tokens(shifted, *case.args[1:]).token_ids

        return jax.lax.fori_loop(0, 3, body, jnp.zeros(NUM_TOKENS, jnp.int32))

    assert run(case.logits).tolist() == (3 * choose(*case.args).token_ids).tolist()


def test_empty_rows_equal_neutral_greedy_values():
    empty = RowSampling.empty(ROWS, ENGINE)
    neutral = dataclasses.replace(
        rows_of(seeds=[0] * ROWS), prompt_lengths=jnp.zeros(ROWS, jnp.int32)
    )
    chex.assert_trees_all_equal(empty, neutral)
    chex.assert_trees_all_equal_shapes_and_dtypes(empty, neutral)


def test_empty_values_are_made_on_the_host():
    values = sampling_lib.empty_row_values(ROWS, ENGINE)
    assert {type(value) for value in values.values()} == {np.ndarray}
    chex.assert_trees_all_equal(RowSampling(**values), RowSampling.empty(ROWS, ENGINE))
    values["seeds"][0] = 3  # they may be written to, and share nothing
    assert not np.any(sampling_lib.empty_row_values(ROWS, ENGINE)["seeds"])


def test_reset_rows():
    everything = {key: value for one in FEATURES.values() for key, value in one.items()}
    used = rows_of(*[SamplingParams(**everything, logprobs=2)] * ROWS)
    mask = jnp.array([True, False, True, False])
    actual = jax.jit(sampling_lib.reset_rows)(used, mask)
    empty = RowSampling.empty(ROWS, ENGINE)
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, used)
    for row, expected in enumerate([empty, used, empty, used]):
        of_row = lambda tree, row=row: jax.tree.map(lambda field: field[row], tree)
        chex.assert_trees_all_equal(of_row(actual), of_row(expected))


def test_rows_without_tokens_switch_nothing_on():
    asks = [SamplingParams(**feature, logprobs=2) for feature in FEATURES.values()]
    for one in asks:
        case = make_case(SamplingParams(temperature=0, ignore_eos=True))
        case = dataclasses.replace(
            case,
            sampling=rows_of(SamplingParams(temperature=0, ignore_eos=True), one),
            row_ids=case.row_ids.at[-3:].set(ROWS),  # padding, clamped to a row
        )
        last = jax.tree.map(lambda field: field.at[-1].set(field[1]), case.sampling)
        case = dataclasses.replace(case, sampling=last)
        used = processing.usage(last, case.row_ids, case.positions)
        assert not any(used), one
        _, scored = choose_and_score(*case.args, max_logprobs=3)
        assert not any(np.any(field) for field in scored)
        alone = score(case.logits, case.row_ids, *case.args[1:], max_logprobs=3)
        assert not any(np.any(field) for field in alone)


def test_rows_without_tokens_change_no_result():
    greedy = SamplingParams(temperature=0, ignore_eos=True)
    params = SamplingParams(temperature=0.7, top_p=0.8, logit_bias={3: 2.0}, logprobs=0)
    case = make_case(params, greedy)
    fuller = [*[params, greedy], *[SamplingParams(top_k=2, logprobs=3, min_p=0.2)] * 2]
    other = dataclasses.replace(case, sampling=rows_of(*fuller))
    run = lambda one: (process(*one.args), choose_and_score(*one.args, max_logprobs=3))
    chex.assert_trees_all_equal(run(case), run(other))


@pytest.mark.parametrize(
    ("params", "seed", "names"),
    [
        ({"logit_bias": {i: 1.0 for i in range(7)}}, 0, "max_bias_entries"),
        (
            {"logit_bias": {1: 1.0}, "bad_token_ids": range(2, 8)},
            0,
            "max_bias_entries",
        ),
        ({"allowed_token_ids": range(6)}, 0, "max_allowed_tokens"),
        ({"stop_token_ids": range(4)}, 0, "max_stop_tokens"),
        ({"logprobs": 4}, 0, "max_logprobs"),
        ({}, 2**64, "seed"),
        ({}, (1, 2**32), "seed"),
        ({}, -1, "seed"),
        ({"temperature": -1.0}, 0, "temperature"),
        ({"allowed_token_ids": EOS, "min_tokens": 1}, 0, "allowed_token_ids"),
    ],
)
def test_row_values_names_what_does_not_fit(params, seed, names):
    with pytest.raises(ValueError, match=names):
        row_values(
            SamplingParams(**params),
            prompt_length=1,
            eos_token_ids=EOS,
            seed=seed,
            engine_config=ENGINE,
        )


def test_row_values():
    values = row_values(
        SamplingParams(
            temperature=1e-9,
            top_k=-1,
            logit_bias={1: 2.0, 5: 1.0},
            bad_token_ids=(5, 5),
            allowed_token_ids=(9, 8, 9),
            stop_token_ids=(90, 4),
        ),
        prompt_length=3,
        eos_token_ids=EOS,
        seed=(2**33 + 5),
        engine_config=ENGINE,
    )
    assert values["temperature"] == 0
    assert values["top_k"] == 0
    assert values["bias_token_ids"].tolist() == [1, 5] + [2**30] * 4
    assert values["bias_values"].tolist() == [2.0, -np.inf, 0, 0, 0, 0]
    assert values["allowed_token_ids"].tolist() == [8, 9] + [2**30] * 3
    assert values["stop_token_ids"].tolist() == [90, 4, -1, -1]
    assert values["seeds"].tolist() == [5, 2]
    assert values["num_logprobs"] == -1
    assert values["has_allowed"]


@pytest.mark.parametrize(
    "change",
    [
        {"logits": jnp.zeros((NUM_TOKENS, VOCAB), jnp.bfloat16)},
        {"positions": jnp.zeros(5, jnp.int32)},
        {"history": jnp.zeros((ROWS - 1, MAX_LENGTH), jnp.int32)},
    ],
)
def test_wrong_shapes_and_dtypes_are_refused(change):
    case = dataclasses.replace(make_case(SamplingParams()), **change)
    with pytest.raises(ValueError, match=next(iter(change))):
        sampling_lib.choose_tokens(*case.args)
