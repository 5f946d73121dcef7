"""Steps compiled for what rows ask for: the same results, and never less than a row needs."""

import dataclasses
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from helpers import tiny_llama

import specjax
from specjax import SamplingParams
from specjax.api.generation import Stream
from specjax.config.engine import EngineConfig
from specjax.decode import executable_store
from specjax.decode.bucket import BURST, Bucket, StepKey
from specjax.decode.decoder import shared_decoder
from specjax.sampling import (
    EVERYTHING,
    RowSampling,
    Uses,
    choose_and_score,
    empty_row_values,
    process_logits,
    row_values,
    token_logprobs,
    uses_of,
)
from specjax.sampling.row_sampling import _EMPTY

NOTHING = Uses(False, False, False, False)
SMALL = EngineConfig(max_rows=2, row_buckets=(), max_context=64, burst_steps=4, max_logprobs=2)
# One way to ask for each feature, beside a temperature where it takes one.
ASKS = {
    "random": dict(temperature=0.9),
    "edits": dict(repetition_penalty=1.3),
    "filters": dict(temperature=0.9, top_k=3),
    "reports": dict(logprobs=1),
}


def values_of(**params):
    sampling = SamplingParams(**{"temperature": 0, **params})
    return row_values(
        sampling, prompt_length=2, eos_token_ids=(1,), seed=3, engine_config=EngineConfig()
    )


@pytest.mark.parametrize(
    "params, uses",
    [
        (dict(), NOTHING),
        (dict(temperature=0.9), NOTHING._replace(random=True)),
        # Nothing is filtered of what is certain.
        (dict(top_p=0.5, top_k=4, min_p=0.1), NOTHING),
        (dict(temperature=1.0, top_p=0.5), NOTHING._replace(random=True, filters=True)),
        (dict(temperature=1.0, top_k=4), NOTHING._replace(random=True, filters=True)),
        (dict(temperature=1.0, min_p=0.1), NOTHING._replace(random=True, filters=True)),
        (dict(logit_bias={3: 1.0}), NOTHING._replace(edits=True)),
        (dict(bad_token_ids=[3]), NOTHING._replace(edits=True)),
        (dict(allowed_token_ids=[3]), NOTHING._replace(edits=True)),
        (dict(min_tokens=2), NOTHING._replace(edits=True)),
        (dict(repetition_penalty=1.1), NOTHING._replace(edits=True)),
        (dict(presence_penalty=0.1), NOTHING._replace(edits=True)),
        (dict(frequency_penalty=0.1), NOTHING._replace(edits=True)),
        (dict(logprobs=0), NOTHING._replace(reports=True)),
        (dict(logprobs=0, entropy=True), NOTHING._replace(reports=True)),
        (dict(self_check=True), NOTHING._replace(reports=True)),
    ],
)
def test_what_a_row_asks_for(params, uses):
    values = values_of(**params)
    assert uses_of(values) == uses
    # Of several rows, what any of them asks for.
    rows = empty_row_values(3, EngineConfig())
    for name, value in values.items():
        rows[name][1] = value
    assert uses_of(rows) == uses


def test_every_field_of_a_row_is_thought_of():
    neutral = {"bias_token_ids", "allowed_token_ids", "stop_token_ids", "prompt_lengths", "seeds"}
    for name, empty in _EMPTY.items():
        values = empty_row_values(1, EngineConfig())
        values["temperature"][...] = 1.0  # filters work on what is random
        before = uses_of(values)
        values[name][...] = 0.5 if empty.dtype == np.float32 else 1
        is_seen = uses_of(values) != before or name == "temperature"
        assert is_seen == (name not in neutral), name


KINDS = [
    {key: value for name in names for key, value in ASKS[name].items()}
    for count in range(len(ASKS) + 1)
    for names in itertools.combinations(ASKS, count)
]


@pytest.mark.parametrize("params", quick(KINDS, {}, ASKS["random"]), ids=str)
def test_what_is_left_out_changes_no_bit(params):
    own = values_of(**params)
    sampling = {
        name: np.stack([value, _EMPTY[name] + np.zeros_like(value)]) for name, value in own.items()
    }
    full = RowSampling(**jax.tree.map(jnp.asarray, sampling))
    narrow = dataclasses.replace(full, uses=uses_of(own))
    logits = jax.random.normal(jax.random.key(1), (5, 40)) * 3
    where = jnp.array([0, 0, 1, 1, 2]), jnp.array([3, 4, 2, 3, 0])
    history = jnp.tile(jnp.arange(8)[None], (2, 1))

    @jax.jit
    def everything(sampling):
        chosen = choose_and_score(logits, sampling, *where, history, max_logprobs=2)
        told = token_logprobs(logits, jnp.arange(5), sampling, *where, history, max_logprobs=2)
        return chosen, told, process_logits(logits, sampling, *where, history)

    for one, other in zip(*(jax.tree.leaves(everything(each)) for each in (full, narrow))):
        np.testing.assert_array_equal(one, other)


PROMPTS = [[5, 6, 7, 5, 6], [9, 8, 9, 8, 9]]
GREEDY, FULL = (
    SamplingParams(temperature=0, max_tokens=6),
    SamplingParams(
        temperature=0.9, seed=2, top_k=5, logprobs=1, presence_penalty=0.3, max_tokens=6
    ),
)


def generate(*sampling, prompts=PROMPTS):
    """Returns the stream of a call after its end."""
    stream = Stream(tiny_llama(0), prompts, sampling=[*sampling], engine=SMALL)
    assert {each.error for each in stream.result()} == {None}
    return stream


def compiled(stream):
    """Returns what the bursts that were compiled so far serve, in order."""
    decoder = stream._loop.decoder
    return [key.uses for key in decoder.all_traces if key.kind == BURST]


@pytest.mark.full  # it compiles three bursts
def test_what_is_compiled_grows_at_most_once(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECJAX_CACHE_DIR", str(tmp_path))
    shared_decoder.cache_clear()
    first = generate(GREEDY, GREEDY)
    assert compiled(first) == [NOTHING]
    # Each feature on its own would be another executable; whoever comes back gets all.
    mixed = generate(FULL, GREEDY)
    assert compiled(mixed) == [NOTHING, EVERYTHING]
    hotter = generate(dataclasses.replace(FULL, temperature=1.0), GREEDY)
    assert len(compiled(hotter)) == 2
    assert mixed.result()[1].token_ids == first.result()[1].token_ids
    executables, key = mixed._loop.decoder.executables, StepKey(BURST, Bucket(2, 0))
    size = lambda uses: len(executables.run_of(key._replace(uses=uses)).as_text())
    assert size(NOTHING) < 0.6 * size(EVERYTHING)
    # What serves everything is read from disk for those that ask for less, unless theirs is there.
    name = lambda uses: executables._file(key._replace(uses=uses), (jnp.ones(2),))
    own, whole = name(NOTHING), name(EVERYTHING)
    assert own != whole
    monkeypatch.setattr(executable_store, "size", {whole: 9}.get)
    assert name(NOTHING) == name(EVERYTHING) == whole
    monkeypatch.setattr(executable_store, "size", {own: 9, whole: 9}.get)
    assert name(NOTHING) == own


@pytest.mark.full  # it compiles a burst
def test_a_call_is_compiled_for_all_of_its_requests():
    shared_decoder.cache_clear()
    penal = dataclasses.replace(GREEDY, presence_penalty=0.5)
    # Those with a penalty come once rows are free.
    late = generate(GREEDY, GREEDY, penal, penal, prompts=PROMPTS * 2)
    assert compiled(late) == [NOTHING._replace(edits=True)]


def test_a_decoder_and_its_plain_one_serve_the_same(monkeypatch):
    shared_decoder.cache_clear()
    decoder = Stream(
        tiny_llama(0), PROMPTS, drafter="ngram", sampling=GREEDY, engine=SMALL
    )._loop.decoder
    assert decoder.plain is not decoder
    assert decoder.uses == decoder.plain.uses == NOTHING
    # Whoever drives a decoder by hand says it with the rows.
    monkeypatch.setattr(decoder, "executables", lambda caller, step, state, admission: (state,))
    values = empty_row_values(1, SMALL) | {"temperature": np.array([0.5])}
    decoder.admit(0, mock.Mock(row_ids=[0], sampling=RowSampling(**values)))
    assert decoder.uses == decoder.plain.uses == NOTHING._replace(random=True)
    # It has run bursts, and the plain one none: both serve everything from here on.
    decoder.has_bursts = True
    decoder.compile_for(NOTHING._replace(edits=True))
    assert decoder.uses == decoder.plain.uses == EVERYTHING
    decoder.compile_for(NOTHING)
    assert decoder.uses == decoder.plain.uses == EVERYTHING


@pytest.mark.full  # it compiles a burst
def test_whoever_serves_compiles_everything_at_once():
    shared_decoder.cache_clear()
    with specjax.Engine(tiny_llama(0), engine=SMALL) as engine:
        engine.add(PROMPTS[0], GREEDY)
        while engine.has_work:
            engine.step()
        assert compiled(engine) == [EVERYTHING]
