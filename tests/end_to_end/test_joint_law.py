"""Four tokens, sampled through the whole step: their joint law is the target's.

Every legal combination of a rule, a kind of draft and sampling parameters runs as rows
of one batch, each row with seeds of its own, over at least two steps. All samples, in
under four minutes on two cores:

    pytest -n 2 --dist load -m slow tests/end_to_end/test_joint_law.py
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_llama, uncached_logits
from scipy import stats

from specjax.config import EngineConfig, SamplingParams
from specjax.decode.decoder import Decoder, Sizes
from specjax.drafters.spec import ModelDrafter, NgramDrafter
from specjax.engine.loop import make_admission
from specjax.engine.request import Request
from specjax.sampling import RowSampling, process_logits, row_values, target_probs
from specjax.trees import static_shapes
from specjax.types import (
    BLOCK,
    DELTA,
    REJECTION,
    SEEDED,
    TRAVERSAL,
    DecoderParams,
    Plan,
)

NUM_SAMPLES = 100_000
FEW_SAMPLES = 2_000  # enough for the mistakes that triple a cell
SIGNIFICANCE = 1e-4
FEWEST_EXPECTED = 5  # of a cell; rarer ones are pooled
ROWS_PER_COMBINATION = 50
VOCAB, NUM_TOKENS = 4, 4
PROMPT = [1, 2, 0, 1, 3, 0, 1]  # "0 1" was followed by 3, "1" by 2 and 3
ENGINE = EngineConfig(max_bias_entries=1, max_allowed_tokens=1, max_logprobs=1)

SAMPLING = {
    "temperature 0.6": SamplingParams(temperature=0.6),
    "temperature 1": SamplingParams(temperature=1),
    "top_p": SamplingParams(temperature=1, top_p=0.9),
    "min_p": SamplingParams(temperature=1, min_p=0.1),
    "penalties": SamplingParams(
        repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3
    ),
}
# The legal combinations: block verification knows no trees, and what matching proposes
# has no law of its own.
RULES = {
    "chain": (SEEDED, DELTA, REJECTION, BLOCK, TRAVERSAL),
    "tree": (SEEDED, DELTA, REJECTION, TRAVERSAL),
    "ngram tree": (SEEDED, DELTA),
}
MODEL = dict(
    vocab_size=VOCAB,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
)


@pytest.fixture(scope="module")
def models():
    """A target, and a draft model of other weights."""
    target, draft = (tiny_llama(seed, **MODEL) for seed in (3, 4))
    # Near enough that drafts are accepted and rejected alike.
    mix = lambda ours, theirs: 0.5 * ours + 0.5 * theirs
    params = jax.tree.map(mix, draft.params, target.params)
    return target, dataclasses.replace(draft, params=params)


def drafter_spec(kind, draft):
    if kind == "ngram tree":
        return NgramDrafter(min_match=1, max_match=2, num_matches=2)
    shape = static_shapes.from_widths((2, 1)) if kind == "tree" else None
    return ModelDrafter(draft.config, shape)


def values_of(params):
    return row_values(
        params,
        prompt_length=len(PROMPT),
        eos_token_ids=(),
        seed=0,
        engine_config=ENGINE,
    )


class Sampler:
    """Rows of every combination of a kind of draft, prefilled once and sampled often."""

    def __init__(self, kind, models):
        target, draft = models
        self.combinations = list(itertools.product(RULES[kind], SAMPLING))
        rules = [rule for rule, _ in self.combinations]
        rows = ROWS_PER_COMBINATION * len(self.combinations)
        spec = drafter_spec(kind, draft)
        sizes = Sizes(
            rows=rows,
            page_size=16,
            num_pages=2 * rows,
            pages_per_row=2,
            burst_steps=1,
        )
        is_model = isinstance(spec, ModelDrafter)
        by_law = sorted(set(rules) - {SEEDED, DELTA})
        self.decoder = Decoder(target.config, spec, sizes, ENGINE, rules=tuple(by_law))
        self.params = DecoderParams(target.params, draft.params if is_model else ())
        # Room behind the tokens that are looked at, or the end would cut the trees.
        max_length = len(PROMPT) + NUM_TOKENS + 12
        requests = {
            row: Request(
                prompt_index=row,
                sample_index=0,
                prompt_token_ids=PROMPT,
                params=SAMPLING[name],
                seed=0,
                draft_cap=2,
                rule=rule,
                max_length=max_length,
                sampling_values=values_of(SAMPLING[name]),
            )
            for row, (rule, name) in enumerate(
                itertools.chain.from_iterable(
                    [each] * ROWS_PER_COMBINATION for each in self.combinations
                )
            )
        }
        state, _ = self.decoder.exchange(
            self.decoder.init(),
            np.zeros(rows, bool),
            make_admission(self.decoder, requests),
        )
        self.state = self.decoder.prefill(
            self.params,
            state,
            np.arange(rows, dtype=np.int32),
            np.full(rows, len(PROMPT) - 1, np.int32),
            max_tokens_per_row=8,
        )
        self._lengths = np.array(self.state.cache.lengths)

    def sample(self, rng, num_samples) -> tuple[np.ndarray, float]:
        """Returns token ids [combinations, n, NUM_TOKENS] of fresh seeds, and the acceptance rate.

        A row that has its tokens begins anew; every row gives equally many samples,
        or those of few steps would be counted more often.
        """
        rows = len(self._lengths)
        quota = -(-num_samples // ROWS_PER_COMBINATION)
        samples = np.empty((rows, quota, NUM_TOKENS), np.int32)
        counts, is_fresh = np.zeros(rows, int), np.ones(rows, bool)
        num_accepted = num_drafted = 0
        while counts.min() < quota:
            report = self._step(rng, is_fresh)
            num_accepted += np.asarray(report.num_accepted).sum()
            num_drafted += np.asarray(report.num_drafted).sum()
            num_new = np.asarray(self.state.cache.lengths) - self._lengths
            is_fresh = num_new >= NUM_TOKENS
            given = np.flatnonzero(is_fresh & (counts < quota))
            first = len(PROMPT)
            history = np.asarray(self.state.history)[given, first : first + NUM_TOKENS]
            samples[given, counts[given]] = history
            counts[given] += 1
        shape = len(self.combinations), -1, NUM_TOKENS
        return samples.reshape(shape), num_accepted / num_drafted

    def _step(self, rng, is_fresh):
        """Runs one step, after putting the rows of is_fresh back to the prompt with new seeds."""
        rows, state = len(self._lengths), self.state
        seeds = rng.integers(0, 2**32, (rows, 2), dtype=np.uint32)
        back = lambda start, now: jnp.asarray(np.where(is_fresh, start, now))
        sampling = dataclasses.replace(
            state.sampling,
            seeds=jnp.asarray(
                np.where(is_fresh[:, None], seeds, np.asarray(state.sampling.seeds))
            ),
        )
        lengths = back(self._lengths, np.asarray(state.cache.lengths))
        state = dataclasses.replace(
            state,
            cache=dataclasses.replace(state.cache, lengths=lengths),
            drafter_lengths=back(self._lengths, np.asarray(state.drafter_lengths)),
            sampling=sampling,
        )
        plan = Plan(
            num_steps=np.int32(1),
            stop_when_finished=np.bool_(False),
            activate=np.ones(rows, bool),
        )
        self.state, report, _ = self.decoder.burst(
            self.params, state, plan, num_speculative_tokens=2
        )
        return report


def exact_law(name, target):
    """Returns f64[VOCAB] * NUM_TOKENS of the target's plain sampling."""
    params = SAMPLING[name]
    law = np.ones([VOCAB] * NUM_TOKENS)
    for length in range(NUM_TOKENS):
        prefixes = list(itertools.product(range(VOCAB), repeat=length))
        texts = jnp.asarray([[*PROMPT, *prefix] for prefix in prefixes], jnp.int32)
        count = len(prefixes)
        logits = uncached_logits(target.params, target.config, texts)[:, -1]
        values = values_of(params)
        sampling = RowSampling(
            **{
                key: jnp.stack([jnp.asarray(value)] * count)
                for key, value in values.items()
            }
        )
        rows = jnp.arange(count)
        places = jnp.full(count, texts.shape[1] - 1)
        processed = process_logits(logits, sampling, rows, places, texts)
        probs = np.asarray(target_probs(processed, sampling, rows), np.float64)
        law *= probs.reshape([VOCAB] * (length + 1) + [1] * (NUM_TOKENS - length - 1))
    return law


def p_value(tokens: np.ndarray, law: np.ndarray) -> float:
    """Returns the chi-square p-value of sampled sequences; 0 where one is impossible."""
    observed = np.zeros(law.shape)
    np.add.at(observed, tuple(tokens.T), 1)
    observed, expected = observed.reshape(-1), law.reshape(-1) * len(tokens)
    expected *= len(tokens) / expected.sum()
    is_rare = expected < FEWEST_EXPECTED
    if observed[expected == 0].any():
        return 0.0
    cells = [
        np.append(counts[~is_rare], counts[is_rare].sum())
        for counts in (observed, expected)
    ]
    keep = cells[1] > 0
    return float(stats.chisquare(cells[0][keep], cells[1][keep]).pvalue)


def check(models, kind, num_samples):
    target, _ = models
    sampler = Sampler(kind, models)
    laws = {name: exact_law(name, target) for name in SAMPLING}
    failed = range(len(sampler.combinations))
    # One declared rerun, of new seeds, for what chance may fail.
    for seed in (0, 1):
        tokens, rate = sampler.sample(np.random.default_rng(seed), num_samples)
        assert 0.1 < rate < 0.9
        values = {
            index: p_value(tokens[index], laws[sampler.combinations[index][1]])
            for index in failed
        }
        failed = [index for index, value in values.items() if value < SIGNIFICANCE]
        if not failed:
            break
    assert not failed, {sampler.combinations[i]: values[i] for i in failed}


def test_joint_law_of_few_samples(models):
    check(models, "tree", FEW_SAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", RULES)
def test_joint_law(models, kind):
    check(models, kind, NUM_SAMPLES)
