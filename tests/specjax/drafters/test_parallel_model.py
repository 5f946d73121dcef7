"""A draft model over mask tokens (PARD): against a dense forward over text and masks.

Half of the rows draw with the target's noise, half take the likeliest tokens (`delta`).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import first_layer, save_llama, tiny_llama, uncached_logits

import specjax
from specjax.cli.bench.fixed_batch import begin
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.config.speculation import SpeculationConfig
from specjax.decode.config import DecoderConfig
from specjax.decode.decoder import Decoder
from specjax.decode.draft import draft
from specjax.decode.sizes import Sizes
from specjax.drafters import one_pass
from specjax.drafters.base import DrafterSpec
from specjax.drafters.other_vocabulary import UNKNOWN, Recoding, recoded
from specjax.drafters.spec import ModelDrafter
from specjax.drafters.token_set import TokenSet
from specjax.engine.request import Request
from specjax.heads.loading import load_drafter
from specjax.sampling import process_logits, row_values
from specjax.sampling.seeded_noise import TARGET_TOKEN, gumbel_noise, token_keys
from specjax.testing import check_drafter
from specjax.text.tokenization import Tokenizer
from specjax.types import DELTA, SEEDED, DecoderParams

ROWS, DEPTH, VOCAB, MASK = 8, 3, 17, 11
PAGE, PAGES_PER_ROW = 4, 14
ROOM = PAGE * PAGES_PER_ROW
ENGINE = EngineConfig(max_bias_entries=1, max_allowed_tokens=1)
# What is drawn depends on the drafts before it by these parameters alone: no draft is fed.
PARAMS = SamplingParams(
    temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.2, max_tokens=ROOM - 8
)
MODEL = tiny_llama(0, vocab_size=VOCAB, num_layers=2)
CONFIG = dataclasses.replace(MODEL.config, mask_token_id=MASK)


def prompt_of(row):
    return [(row * 5 + place) % VOCAB for place in range(row % 3 + 2)]


def rule_of(row):
    return SEEDED if row < ROWS // 2 else DELTA


def request_of(row):
    prompt = prompt_of(row)
    return Request(
        prompt_index=row,
        sample_index=0,
        prompt_token_ids=prompt,
        params=PARAMS,
        seed=row,
        draft_cap=DEPTH,
        rule=rule_of(row),
        max_length=len(prompt) + PARAMS.max_tokens,
        sampling_values=row_values(
            PARAMS, prompt_length=len(prompt), eos_token_ids=(), seed=row, engine_config=ENGINE
        ),
    )


@jax.jit
def race(logits, positions, sampling, has_noise, history):
    """Returns what the target takes the argmax of, from logits f32[ROWS, VOCAB]."""
    every = jnp.arange(ROWS)
    scores = process_logits(logits, sampling, every, positions, history)
    noise = gumbel_noise(token_keys(sampling.seeds, positions + 1, TARGET_TOKEN), VOCAB)
    return scores + has_noise[:, None] * noise


class Texts:
    """Rows that draft and go on, and what a dense forward says that they draft."""

    def __init__(self, said=None):
        self.said = said
        spec = ModelDrafter(CONFIG, said=said)
        sizes = Sizes(
            rows=ROWS,
            page_size=PAGE,
            num_pages=ROWS * PAGES_PER_ROW,
            pages_per_row=PAGES_PER_ROW,
            burst_steps=1,
        )
        config = DecoderConfig(target=MODEL.config, drafter=spec, sizes=sizes, engine=ENGINE)
        decoder = Decoder(config)
        weights = DecoderParams(MODEL.params, MODEL.params)
        state = begin(decoder, weights, list(map(request_of, range(ROWS))))
        self.state = dataclasses.replace(state, is_active=jnp.ones(ROWS, bool))
        drafter = decoder.step_spec(DEPTH).drafter
        self._draft = jax.jit(lambda state: draft(drafter, weights, state, DEPTH, VOCAB))
        self.texts = [prompt_of(row) for row in range(ROWS)]

    def draft(self, caps=(DEPTH,) * ROWS):
        """Drafts; returns the tokens of each row."""
        caps = jnp.array(caps, jnp.int32)
        self.state, found = self._draft(dataclasses.replace(self.state, draft_caps=caps))
        assert (np.asarray(found.proposal.num_tokens) == np.asarray(caps)).all()
        self.written = np.asarray(found.written)
        tokens = np.asarray(found.proposal.token_ids)
        return [row[:cap] for row, cap in zip(tokens.tolist(), caps.tolist(), strict=True)]

    def expected(self, drafts):
        """Returns what each row drafts, given the drafts before each token."""
        text = np.zeros((ROWS, ROOM), np.int32)
        for row, own in enumerate(self.texts):
            text[row, : len(own) + DEPTH - 1] = [*own, *[MASK] * (DEPTH - 1)]
        logits = np.asarray(uncached_logits(MODEL.params, CONFIG, text))
        has_noise = np.array([rule_of(row) == SEEDED for row in range(ROWS)], np.float32)
        found = [[] for _ in range(ROWS)]
        for ahead in range(DEPTH):
            positions = np.array([len(own) - 1 + ahead for own in self.texts], np.int32)
            history = np.zeros((ROWS, ROOM), np.int32)
            for row, own in enumerate(self.texts):
                before = [*own, *drafts[row][:ahead]]
                history[row, : len(before)] = before
            own = jnp.asarray(logits[np.arange(ROWS), positions])
            scores = np.array(race(own, positions, self.state.sampling, has_noise, history))
            if self.said is not None:
                scores[:, ~self.said.flags] = -np.inf
            for row, token in enumerate(scores.argmax(axis=1).tolist()):
                if ahead < len(drafts[row]):
                    found[row].append(token)
        return found

    def commit(self, tokens, *, has_drafted=True):
        """Adds tokens to each row's text, as a step does: the last one is the new root."""
        for row, new in enumerate(tokens):
            self.texts[row] = [*self.texts[row], *new]
        history = np.array(self.state.history)
        for row, own in enumerate(self.texts):
            history[row, : len(own)] = own
        lengths = jnp.array([len(own) - 1 for own in self.texts], jnp.int32)
        seen = self.state.drafter_lengths
        if has_drafted:
            seen = jnp.minimum(jnp.asarray(self.written), lengths)
        cache = dataclasses.replace(self.state.cache, lengths=lengths)
        self.state = dataclasses.replace(
            self.state, cache=cache, history=jnp.asarray(history), drafter_lengths=seen
        )


def check(texts, caps=(DEPTH,) * ROWS):
    drafts = texts.draft(caps)
    assert drafts == texts.expected(drafts)
    return drafts


@pytest.mark.full
def test_drafts_are_what_a_dense_forward_says_after_the_root_and_each_mask():
    """After a prompt; after all, some and no drafts were accepted; after steps without drafts."""
    texts = Texts()
    drafts = check(texts)
    assert len({tuple(row) for row in drafts}) > 2
    texts.commit([[*own, 5] for own in drafts])  # all accepted
    drafts = check(texts)
    texts.commit([[*own, 5] for own in drafts])
    texts.commit([[row % VOCAB] for row in range(ROWS)], has_drafted=False)
    drafts = check(texts)  # of a token more than what goes into one forward with the masks
    texts.commit([[*own[: row % DEPTH], row % VOCAB] for row, own in enumerate(drafts)])
    check(texts)
    rng = np.random.default_rng(0)
    for num_more in (1, 2, 19):  # K = 0: the drafter sees nothing
        texts.commit(rng.integers(0, VOCAB, (ROWS, num_more)).tolist(), has_drafted=num_more == 1)
    # Rows that draft less than others, and rows that draft nothing and stay behind.
    caps = [row % (DEPTH + 1) for row in range(ROWS)]
    drafts = check(texts, caps)
    texts.commit([[*own, 3] for own in drafts])
    check(texts, caps[::-1])


@pytest.mark.full
def test_logits_one_by_one_and_some_tokens_alone(monkeypatch):
    monkeypatch.setattr(one_pass, "MOST_LOGIT_BYTES", 0)
    said = TokenSet.of(np.arange(VOCAB) % 2 == 1)
    texts = Texts(said)
    drafts = check(texts)
    assert {token for row in drafts for token in row} <= set(np.flatnonzero(said.flags))
    texts.commit([[*own, 5] for own in drafts])
    check(texts)
    monkeypatch.undo()
    check(Texts(said))


def test_the_logits_of_a_step_are_kept_at_once_where_they_are_few():
    assert one_pass.fits(rows=32, num_speculative_tokens=8, vocab_size=128_256)
    assert not one_pass.fits(rows=256, num_speculative_tokens=8, vocab_size=128_256)


@pytest.mark.full
def test_a_step_takes_one_forward():
    """Its work is that of one forward of a block, and what it keeps ends at the root."""
    texts = Texts()
    texts.draft()
    assert texts.written.tolist() == [len(own) for own in texts.texts]
    spec = ModelDrafter(CONFIG)
    (work,) = spec.work(MODEL.config, np.float32)
    (alone,) = dataclasses.replace(spec, is_parallel=False).work(MODEL.config, np.float32)
    assert [work.forward_tokens(k) for k in (1, 4, 5)] == [2, 8, 10]
    assert [each.num_forwards(5) for each in (work, alone)] == [1, 5]
    assert (spec.num_nodes(DEPTH), spec.tree_slots(DEPTH)) == (1 + DEPTH, 0)


@pytest.mark.slow
def test_it_keeps_the_contract_of_drafters():
    target = tiny_llama(3, vocab_size=VOCAB)
    check_drafter(specjax.LoadedDrafter("masks", ModelDrafter(CONFIG), MODEL.params), target)


# The user's door


@functools.cache
def target():
    return tiny_llama(0)


@pytest.fixture
def folder(tmp_path):
    """Returns a function that writes a draft model whose config.json has some more keys."""

    def write(**keys):
        save_llama(tmp_path, first_layer(target()), **keys)
        return tmp_path

    return write


@pytest.mark.parametrize("key", ["pard_token", "ptd_token_id"])
def test_a_folder_says_its_mask_token(folder, key):
    found = load_drafter(folder(**{key: 7}), target())
    assert found.spec.config.mask_token_id == 7
    assert found.spec.takes_masks
    assert not load_drafter(folder(), target()).spec.takes_masks


@pytest.mark.parametrize("value", [61, -1, "7", True])
def test_a_mask_token_that_is_none(folder, value):
    with pytest.raises(ValueError, match=r"pard_token=.* is no token"):
        load_drafter(folder(pard_token=value), target())


def test_a_config_may_turn_it_off_and_on(folder):
    found = load_drafter(folder(pard_token=7), target())
    change = lambda value: (
        load_drafter(found, target(), SpeculationConfig(parallel_drafting=value)).spec
    )
    assert change(None) is found.spec
    assert change(True).takes_masks
    assert not change(False).takes_masks
    # By token it is any draft model: trees, and history beside it.
    for fields in ({"tree_top_k": 2}, {"speculative_token_tree": (2, 1)}, {"corpus_tokens": 512}):
        load_drafter(found, target(), SpeculationConfig(parallel_drafting=False, **fields))
        with pytest.raises(ValueError, match="parallel_drafting=False"):
            load_drafter(found, target(), SpeculationConfig(**fields))


@pytest.mark.parametrize(
    "source",
    ["ngram", "history", "model", DrafterSpec()],
    ids=lambda source: source if isinstance(source, str) else type(source).__name__,
)
def test_drafters_without_a_mask_token(source):
    source = first_layer(target()) if source == "model" else source
    load_drafter(source, target(), SpeculationConfig(parallel_drafting=False))
    with pytest.raises(ValueError, match=r"names a mask token \(pard_token\), and .* has none"):
        load_drafter(source, target(), SpeculationConfig(parallel_drafting=True))


def test_the_switch_is_on_or_off():
    with pytest.raises(ValueError, match="parallel_drafting='yes' must be True, False or None"):
        SpeculationConfig(parallel_drafting="yes")


def of_padding(mask):
    """Returns a target, and a draft model with one tokenizer and three rows more."""
    tokenizer = object.__new__(Tokenizer)
    draft = tiny_llama(1, vocab_size=64, num_layers=1, mask_token_id=mask)
    return (dataclasses.replace(model, tokenizer=tokenizer) for model in (target(), draft))


def test_a_mask_token_that_the_target_has_too():
    ours, draft = of_padding(7)
    found = load_drafter(draft, ours)
    assert found.spec.config.mask_token_id == 7
    assert found.spec.takes_masks


def test_a_mask_token_that_the_target_lacks():
    ours, draft = of_padding(62)
    with pytest.raises(
        ValueError, match=r"mask token of draft .*, 62, has no row in the vocabulary"
    ):
        load_drafter(draft, ours)
    off = SpeculationConfig(parallel_drafting=False)
    assert not load_drafter(draft, ours, off).spec.takes_masks


@pytest.mark.parametrize("mask", [8, 9])
def test_a_mask_token_gets_a_row_for_which_the_target_has_no_token(mask):
    """Rows 3 and 8 are of no token of the target; the draft's 8 and 9 are none of the target's."""
    draft = tiny_llama(1, vocab_size=10, num_layers=1, mask_token_id=mask)
    own = np.array([0, 1, 2, UNKNOWN, 4, 5, UNKNOWN, 7, UNKNOWN], np.int32)
    by = Recoding(own, TokenSet.of(own != UNKNOWN), {6: (1, 2)})
    found = recoded(draft, by)
    assert found.config.mask_token_id == 8
    rows = [np.asarray(model.params["embed_tokens"]) for model in (found, draft)]
    np.testing.assert_array_equal(rows[0][8], rows[1][mask])
    np.testing.assert_array_equal(rows[0][3], 0)
    np.testing.assert_array_equal(rows[0][own >= 0], rows[1][own[own >= 0]])


def test_pard_2_is_refused(folder):
    with pytest.raises(ValueError, match="PARD-2"):
        load_drafter(folder(pard_token=7, pard2=True, pard2_target_layers=[1, 2]), target())
