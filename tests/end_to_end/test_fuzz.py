"""Requests at random, with drafters and settings of many kinds: texts are those of plain decoding.

Requests come at any step, are streamed, left, aborted and late; pages are short; K changes from
burst to burst. Every text, whole or cut, is that of its request alone, decoded plainly under the
same weights. Where two tokens are as good as equally likely to be chosen, either is right.
"""

import collections
import dataclasses
import functools
import pathlib
import random
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from eagle3_heads import make_head
from head_equations import TARGET as TINY
from helpers import assert_engine_is_empty, uncached_logits

import specjax
from specjax.api import engine as api_engine
from specjax.api.requests import derive_seed
from specjax.engine import deadlines
from specjax.heads.specs import EagleDrafter
from specjax.policy.interface import Decision
from specjax.sampling.row_sampling import seed_words
from specjax.sampling.seeded_noise import TARGET_TOKEN, gumbel_noise, token_keys

K, CONTEXT = 3, 96
# Pages for hardly two rows of four: requests are preempted.
ENGINE = specjax.EngineConfig(
    page_size=8,
    max_rows=4,
    burst_steps=8,
    max_context=CONTEXT,
    num_pages=12,
    row_buckets=(),
    max_prefill_tokens=4,  # one token bucket
)
# Scores of this distance are as good as equal: float32 in another order. Keys of fp8 have 3 bits.
TIE, TIE_OF_FP8 = 1e-3, 0.1
MOST_TIES = 2e-3  # of all tokens
HISTORY = {"corpus_tokens": 1024}
TABLE = {"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 3, 1], [4, 4, 0]]}
# Requests come until each of these has happened.
RARE = "preemptions", "aborted running", "aborted waiting", "cut by a deadline", "left"
ADAPT = dict(every_tokens=64, rows=4, length=32, replay=8, max_share=0.5)
# Each: the drafter, fields of SpeculationConfig, and fields of EngineConfig.
CASES = {
    "EAGLE-3, grown trees": ("demo-eagle3", {"tree_top_k": 2}, {}),
    "EAGLE-3, a tree": (
        "demo-eagle3",
        {"speculative_token_tree": "[(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]"},
        {},
    ),
    "EAGLE-3, fp8": ("demo-eagle3", {}, {"kv_cache_dtype": "fp8"}),
    "DSpark beside history": ("demo-dspark", HISTORY, {}),
    "DSpark, K by batch size": ("demo-dspark", TABLE, {}),
    "a part of the vocabulary": ("part", {}, {}),
    "a part of the vocabulary, trees": ("part", {"tree_top_k": 2}, {}),
    "it learns": ("demo-eagle3", {}, {}),
    "new weights": ("demo-eagle3", {}, {}),
}


class AnyDepth:
    """Drafts or none at random, burst by burst."""

    max_speculative_tokens = K
    chooses_rows = False

    def __init__(self, seed):
        self._draw = random.Random(seed)

    def choose(self, load):
        depth = load.limit(self._draw.choice((0, K, K)))
        return Decision(num_speculative_tokens=depth, reason="at random")

    def observe(self, outcome):
        pass


@functools.cache
def demo():
    return specjax.load_model("demo")


@functools.cache
def words():
    """Returns tokens of a text that the embedded model knows how to go on with."""
    return demo().tokenizer.encode(pathlib.Path(__file__).read_text(encoding="utf-8"))


@functools.cache
def drafter_of(name):
    if name != "part":
        return specjax.load_drafter(name, demo())
    # EAGLE-3 of the tokens that stand in the text, by the target's own rows.
    head = drafter_of("demo-eagle3")
    ids = jnp.asarray(sorted(set(words())), jnp.int32)
    own = head.params.get("lm_head", demo().params.get("lm_head", demo().params["embed_tokens"]))
    config = dataclasses.replace(
        head.spec.config,
        layers=dataclasses.replace(head.spec.config.layers, vocab_size=len(ids)),
        has_head=True,
        maps_vocabulary=True,
    )
    params = {**head.params, "lm_head": own[ids], "target_ids": ids}
    return specjax.LoadedDrafter("part", EagleDrafter(config), params)


@functools.cache
def weights(number):
    """Returns the target's weights after some updates: near those of version 0, not equal."""
    return jax.tree.map(lambda leaf: leaf * (1 + 0.01 * number), demo().params)


def gaps(config, params_of, seed, prompt, tokens, versions, temperature):
    """Returns by how much each token's score is below the best one's, computed densely.

    Args:
      params_of: version -> weights.
      seed: u32[2], of the sample.
    """
    text = np.zeros(CONTEXT, np.int32)
    text[: len(prompt) + len(tokens)] = [*prompt, *tokens]
    logits = {
        version: np.asarray(uncached_logits(params_of(version), config, text[None])[0])
        for version in set(versions)
    }
    noise = np.asarray(drawn(jnp.asarray(seed, jnp.uint32), config.vocab_size))
    found = []
    for at, (token, version) in enumerate(zip(tokens, versions, strict=True), len(prompt)):
        scores = logits[version][at - 1]
        scores = scores / temperature + noise[at] if temperature else scores
        found.append(float(scores.max() - scores[token]))
    return found


@functools.partial(jax.jit, static_argnums=1)
def drawn(seed, vocab_size):
    """Returns what tokens of each position race with, f32[CONTEXT, vocab]."""
    seeds = jnp.broadcast_to(seed, (CONTEXT, 2))
    return gumbel_noise(token_keys(seeds, jnp.arange(CONTEXT), TARGET_TOKEN), vocab_size)


def gaps_of(completion, tokens, versions, temperature):
    """Returns the gaps of tokens after a completion's prompt, with its seed."""
    seed = seed_words(derive_seed(completion.seed, completion.sample_index))
    prompt = completion.prompt_token_ids
    params_of = lambda version: weights(version % 5)
    return gaps(demo().config, params_of, seed, prompt, tokens, versions, temperature)


class Fuzz:
    """Requests of many kinds on one engine; counts what was compared."""

    def __init__(self, engine, seed, *, changes_weights=False):
        self.engine, self.draw = engine, random.Random(seed)
        self.requests = random.Random(seed)  # the same on every engine: decoded alone once
        self.changes_weights = changes_weights
        self.asked, self.texts = {}, collections.defaultdict(list)  # by request; and sample
        self.completions, self.streams = [], {}
        self.counts = collections.Counter()
        self.now = time.perf_counter()  # what learns compares deadlines with this clock

    def run(self, num_requests):
        while self._is_short_of(num_requests) or self.engine.has_work or self.streams:
            for _ in range(self.draw.choice((0, 0, 0, 1, 3))):
                if self._is_short_of(num_requests):
                    self._add()
            if self.draw.random() < 0.2:  # before a step, so that what was just added waits
                self._abort(is_running=self.draw.random() < 0.4)
            if self.streams and self.draw.random() < 0.7:
                self._read(self.draw.choice(list(self.streams)))
            elif self.engine.has_work:
                self._take(self.engine.step(max_burst_steps=self.draw.choice([None, 1, 2, 5])))
            if self.changes_weights and self.draw.random() < 0.08:
                version = self.engine.params_version + 1
                self.engine.update_params(weights(version % 5), running="recompute")
                self.counts["updates"] += 1
        assert_engine_is_empty(self.engine)
        assert all(self.counts[each] > 0 for each in RARE), self.counts

    def _is_short_of(self, num_requests):
        """Returns whether more are to come: of what is rare, up to six times as many."""
        self.counts["preemptions"] = self.engine._loop.num_preemptions
        is_short = not all(self.counts[each] for each in RARE)
        return len(self.asked) < num_requests * (6 if is_short else 1)

    def tick(self):
        """Returns a time that is later by at most a second each time it is asked for."""
        self.now += self.draw.random()
        return self.now

    def _abort(self, *, is_running):
        numbers = [each for each in self.engine._outbox.ids() if self._runs(each) == is_running]
        if numbers:
            name = "aborted running" if is_running else "aborted waiting"
            self.counts[name] += self.engine.abort(self.draw.choice(numbers))

    def _runs(self, number):
        rows = self.engine._loop.scheduler.occupied
        return any(row.request.prompt_index == number for row in rows)

    def _add(self):
        draw, text = self.requests, words()
        first, length = draw.randrange(len(text) - 64), draw.choice((1, 7, 8, 9, 17, 25))
        sampling = specjax.SamplingParams(
            n=draw.choice((1, 1, 2)),
            temperature=draw.choice((0.0, 0.0, 0.6, 1.0)),
            max_tokens=draw.choice((1, 24, 32, 48)),
            ignore_eos=True,
            seed=draw.randrange(1000),
            speculate=draw.random() < 0.9,
        )
        prompt = text[first : first + length]
        late = {"deadline_s": draw.choice([None] * 4 + [0.0, 8.0, 12.0, 16.0])}
        number = self.engine._num_added
        if draw.random() < 0.5:
            stream = self.engine.stream(prompt, sampling, **late)
            self.asked[number] = prompt, sampling
            self.streams[number] = stream
            self._read(number)
        else:
            assert self.engine.add(prompt, sampling, **late) == number
            self.asked[number] = prompt, sampling

    def _read(self, number):
        chunk = next(self.streams[number], None)
        if chunk is not None:
            self._take([chunk])
        if chunk is None or self.draw.random() < 0.25:
            self.counts["left"] += self._runs(number)
            self.streams.pop(number).close()

    def _take(self, chunks):
        for chunk in chunks:
            assert chunk.error is None
            self.texts[chunk.prompt_index, chunk.sample_index] += chunk.token_ids
            if (done := chunk.completion) is not None:
                self.completions.append(done)
                self.counts[done.finish_reason] += 1
                asked = self.asked[done.prompt_index][1].max_tokens
                is_cut = done.finish_reason == "deadline" and 0 < len(done.token_ids) < asked
                self.counts["cut by a deadline"] += is_cut

    def check(self, alone, tie):
        """Asserts that every text is its request's own; returns what was counted.

        Args:
          alone: (prompt, sampling) -> completions by sample; None: the dense model decides.
        """
        for done in self.completions:
            assert self.texts[done.prompt_index, done.sample_index] == done.token_ids
        for (number, sample), tokens in self.texts.items():
            prompt, sampling = self.asked[number]
            self.counts["texts"] += 1
            self.counts["tokens"] += len(tokens)
            if alone is not None:
                self._compare(tokens, alone(prompt, sampling)[sample], sampling.temperature, tie)
        for done in self.completions if alone is None else []:
            temperature = self.asked[done.prompt_index][1].temperature
            found = gaps_of(done, done.token_ids, done.params_versions, temperature)
            assert max(found, default=0.0) < tie, (done, found)
            self.counts["ties"] += sum(gap > 0 for gap in found)
        assert self.counts["ties"] <= max(MOST_TIES * self.counts["tokens"], 1), self.counts
        return self.counts

    def _compare(self, tokens, expected, temperature, tie):
        if tokens == expected.token_ids[: len(tokens)]:
            return
        at = next(i for i, (a, b) in enumerate(zip(tokens, expected.token_ids)) if a != b)
        gap = gaps_of(expected, tokens[: at + 1], [0] * (at + 1), temperature)[-1]
        assert gap < tie, (tokens, expected.token_ids, at, gap)
        self.counts["ties"] += 1


@functools.cache
def alone_of(dtype):
    """Returns what decodes a request plainly, by itself, in steps of an engine of its own."""
    config = dataclasses.replace(ENGINE, kv_cache_dtype=dtype, num_pages=None, max_rows=2)
    engine, known = specjax.Engine(demo(), engine=config), {}

    def alone(prompt, sampling):
        key = tuple(prompt), repr(sampling)
        if key not in known:
            engine.add(prompt, sampling)
            chunks = []
            while engine.has_work:
                chunks += engine.step()
            known[key] = {each.sample_index: each.completion for each in chunks if each.completion}
        return known[key]

    return alone


def run_case(name, seed, num_requests):
    drafter, speculation, fields = CASES[name]
    config = dataclasses.replace(ENGINE, **fields)
    more = {} if "batch_size" in str(speculation) else {"policy": AnyDepth(seed)}
    if name == "it learns":
        more["adapt"] = specjax.Adapt(optax.adam(1e-3), **ADAPT)
    speculation = {"num_speculative_tokens": K} | speculation
    with specjax.Engine(
        demo(), drafter=drafter_of(drafter), speculative_config=speculation, engine=config, **more
    ) as engine:
        fuzz = Fuzz(engine, seed, changes_weights=name == "new weights")
        with pytest.MonkeyPatch.context() as changed:
            clock = types.SimpleNamespace(perf_counter=fuzz.tick)
            changed.setattr(api_engine, "time", clock)  # which says when a deadline is,
            changed.setattr(deadlines, "time", clock)  # and whether it has passed
            fuzz.run(num_requests)
        fuzz.counts["accepted"] = engine.stats.acceptance.num_accepted
        if name == "it learns":
            fuzz.counts["lessons"] = engine.adaptation.num_updates
    alone = None if name == "new weights" else alone_of(config.kv_cache_dtype)
    tie = TIE_OF_FP8 if config.kv_cache_dtype else TIE
    return fuzz.check(alone, tie)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_any_requests_have_the_texts_of_plain_decoding(name, say):
    counts = run_case(name, 1, 16)
    say(f"{name}: {dict(counts)}")
    assert counts["accepted"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 10))
@pytest.mark.parametrize("name", CASES)
def test_many_requests_have_the_texts_of_plain_decoding(name, seed, say):
    say(f"{name}, {seed}: {dict(run_case(name, seed, 60))}")


# Streams of rollouts

STREAMS = {
    "a part of the vocabulary": ({}, {"num_pages": None}),
    "beside history": (HISTORY, {"num_pages": None}),
    "short pages": ({}, {}),
}


def tiny_weights(version):
    return jax.tree.map(lambda leaf: leaf * (1 + 0.02 * (version % 5)), TINY.params)


def stream_case(name, seed, most):
    """Runs a stream whose weights are replaced after each batch; returns what was counted.

    Rows are fed again, so that each token is of its version alone.
    """
    speculation, fields = STREAMS[name]
    config, params = make_head("own_tables")
    decoder = specjax.build_decoder(
        TINY,
        drafter=specjax.LoadedDrafter("head", EagleDrafter(config), params),
        speculative_config={"num_speculative_tokens": K, **speculation},
        engine=dataclasses.replace(ENGINE, **fields),
        policy=AnyDepth(seed),
    )
    draw, counts = random.Random(seed), collections.Counter()
    feed = [[draw.randrange(61)] * draw.choice((1, 3, 8, 9, 30)) for _ in range(24)]
    sampling = specjax.SamplingParams(temperature=0.8, max_tokens=30, seed=seed, ignore_eos=True)
    options = dict(num_samples=2, sampling=sampling, max_staleness=most, params_version=0)
    with specjax.rollout_stream(decoder, tiny_weights(0), feed, **options) as stream:
        for batch in stream:
            for index in range(batch.num_samples):
                check_sample(batch, index, sampling, counts)
            counts["updates"] += 1
            version = stream.params_version + 1
            stream.update_params(tiny_weights(version), version, recomputes=True)
        counts["restarted"] = stream.metrics["num_restarted"]
    assert counts["texts"] == 2 * len(feed)
    assert counts["ties"] <= max(MOST_TIES * counts["tokens"], 1), counts
    return counts


def check_sample(batch, index, sampling, counts):
    """Asserts that each token of a sample is what its version of the weights chooses."""
    prompt_mask, mask = (np.asarray(x[index]) for x in (batch.prompt_mask, batch.completion_mask))
    prompt = np.asarray(batch.prompt_ids[index])[prompt_mask].tolist()
    tokens = np.asarray(batch.completion_ids[index])[mask].tolist()
    versions = np.asarray(batch.params_versions[index])[mask].tolist()
    assert len(tokens) == sampling.max_tokens
    seed = np.asarray(batch.seeds[index])
    found = gaps(TINY.config, tiny_weights, seed, prompt, tokens, versions, sampling.temperature)
    assert max(found) < TIE, (prompt, tokens, versions, found)
    counts.update(
        texts=1,
        tokens=len(tokens),
        ties=sum(gap > 0 for gap in found),
        mixed=len(set(versions)) > 1,
    )


@pytest.mark.full
def test_streams_of_rollouts_under_new_weights(say):
    for most in (0, 1):
        counts = stream_case("short pages", 1, most)
        say(f"staleness {most}: {dict(counts)}")
        assert (counts["mixed"] > 0) == (most > 0)
        assert most or counts["restarted"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("name", STREAMS)
def test_many_streams_of_rollouts_under_new_weights(name, seed, say):
    for most in (0, 1, 2, None):
        say(f"{name}, {seed}, staleness {most}: {dict(stream_case(name, seed, most))}")
