"""Hidden states that reach a drafter, against a dense forward's, whatever happens to rows."""

import dataclasses

import jax
import numpy as np
import pytest
from asked_for import quick
from helpers import ScriptedDrafter, assert_engine_is_empty, tiny_llama
from tap_keeper import TapKeeper, Told

import specjax
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.decode import absorb, burst, mixed
from specjax.decode.bucket import Bucket
from specjax.decode.decoder import shared_decoder
from specjax.drafters.spec import NgramDrafter
from specjax.engine import run_state
from specjax.policy.interface import Decision

pytestmark = pytest.mark.full

PAGE_SIZE, MAX_LENGTH = 4, 64
ENGINE = EngineConfig(
    page_size=PAGE_SIZE,
    max_rows=4,
    burst_steps=4,
    max_context=MAX_LENGTH,
    max_prefill_tokens=4,
    row_buckets=(2,),
)
CHAIN = NgramDrafter(1, 3)
TREE = NgramDrafter(1, 3, num_matches=3)
SAMPLING = SamplingParams(temperature=0.7, max_tokens=18, ignore_eos=True, seed=3)
GREEDY = dataclasses.replace(SAMPLING, temperature=0.0)  # repeats itself: drafts are accepted
# One token in a row that was used before; a prompt three times, all but whose last token fill
# pages; another end of shared pages; a chunk and more.
SAME = [*range(1, 1 + 2 * PAGE_SIZE), 3]
PROMPTS = [
    [7, 8] * 9,
    SAME,
    [5],
    SAME,
    [9],
    [*SAME[:PAGE_SIZE], 40, 41, 42],
    SAME,
    [6],
    [1, 2, 3, 1, 2, 3, 1],
    [*SAME[: 2 * PAGE_SIZE], 11],
]


class InTurn:
    """A K for every burst, one after the other, in buckets of few rows where these do."""

    max_speculative_tokens = 3
    chooses_rows = True

    def __init__(self, *depths, max_drafts=None):
        self.depths = depths
        self.max_drafts = max_drafts  # in the bucket of all rows
        self.num_chosen = 0
        self.accepted = []
        self.row_buckets = set()

    def choose(self, load):
        depth = load.limit(self.depths[self.num_chosen % len(self.depths)])
        self.num_chosen += 1
        self.row_buckets.add(load.row_buckets[0])
        rows = load.row_buckets[0]
        is_ranked = rows == ENGINE.max_rows and depth > 1
        return Decision(
            num_speculative_tokens=depth,
            reason="in turn",
            row_bucket=rows,
            max_drafts=self.max_drafts if is_ranked else None,
        )

    def observe(self, outcome):
        if outcome.bucket.num_speculative_tokens:
            self.accepted.append(int(np.sum(outcome.num_accepted)))


@pytest.fixture(scope="module")
def target():
    return tiny_llama(0)


def drain(engine, ids, after_step=lambda: None):
    """Steps until nothing is left; returns the token ids of each request."""
    tokens = {each: [] for each in ids}
    while engine.has_work:
        for chunk in engine.step():
            assert chunk.error is None
            tokens[chunk.prompt_index] += chunk.token_ids
        if engine.has_work:
            after_step()
    return [tokens[each] for each in ids]


def add_all(engine):
    """Queues all prompts, every other one greedy; returns their ids."""
    return [engine.add(prompt, (SAMPLING, GREEDY)[i % 2]) for i, prompt in enumerate(PROMPTS)]


def run(target, spec, policy, *, engine=ENGINE, **arguments):
    """Runs requests; after each step compares all that the drafter was told.

    Returns:
      What was compared, the token ids of each request, and the engine's loop.
    """
    layers = tuple(tap % (target.config.num_layers + 1) for tap in spec.layers)
    told = Told(target, layers, MAX_LENGTH)
    with specjax.Engine(
        target,
        drafter=spec,
        num_speculative_tokens=3,
        engine=engine,
        policy=policy,
        **arguments,
    ) as running:
        tokens = drain(running, add_all(running), lambda: told.check(running))
        assert_engine_is_empty(running)
        return told, tokens, running._loop


@pytest.fixture(scope="module")
def plain(target):
    with specjax.Engine(target, engine=ENGINE) as engine:
        return drain(engine, add_all(engine))


def num_fed_without_sharing():
    return sum(len(prompt) - 1 for prompt in PROMPTS)


@pytest.fixture(scope="module")
def script(target, plain):
    """Returns a drafter that is right about some of the tokens that follow."""
    texts = [(*prompt, *tokens) for prompt, tokens in zip(PROMPTS, plain)]
    return ScriptedDrafter(tuple(texts), (2, 0, 3, 1), target.config.vocab_size)


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_a_drafter_is_told_of_every_token(target, plain, script, kind):
    """Prompts, shared prefixes, reused rows, drafts that are rejected, K = 0 between them."""
    policy = InTurn(3, 0, 0, 2) if kind == "chain" else InTurn(3, 0, 0)
    told, tokens, loop = run(target, TapKeeper(script if kind == "chain" else TREE), policy)
    assert tokens == plain
    assert told.num_compared > 500
    assert sum(policy.accepted) > (20 if kind == "chain" else 3)
    assert {2, 4} <= policy.row_buckets
    # Two pages of a prompt were shared at least three times, but for a token fed again.
    assert loop.num_prefilled <= num_fed_without_sharing() - 3 * (2 * PAGE_SIZE - 1)


@pytest.mark.parametrize(
    "how",
    [
        dict(engine=dict(num_pages=17, burst_steps=1)),  # rows are preempted
        dict(engine=dict(mixed_prefill=False)),
        pytest.param(dict(engine=dict(numerics="invariant")), marks=pytest.mark.slow),
        dict(engine=dict(burst_steps=19)),  # windows of K = 0 that are cut
        pytest.param(dict(verification="rejection"), marks=pytest.mark.slow),
        dict(verification="rejection", engine=dict(logit_bytes=4 * 61 * 4)),  # rows in chunks
    ],
    ids=str,
)
def test_whatever_happens_to_rows(target, plain, script, how):
    engine = dataclasses.replace(ENGINE, **how.get("engine", {}))
    options = {name: value for name, value in how.items() if name != "engine"}
    policy = InTurn(3, 0)
    inner = CHAIN if options else script  # a script has no laws to compare
    told, tokens, loop = run(target, TapKeeper(inner), policy, engine=engine, **options)
    assert told.num_compared > 300
    assert (loop.num_preemptions > 0) == (engine.num_pages is not None)
    if not options and engine.numerics == "fast":
        assert tokens == plain


@pytest.mark.parametrize("shape", quick([(2, 1), (1, 2), (2, 2)], slow=[(2, 1), (1, 2)]), ids=str)
def test_over_a_mesh(target, plain, script, shape):
    mesh = jax.make_mesh(shape, ("data", "tensor"), devices=jax.devices()[: shape[0] * shape[1]])
    told, tokens, _ = run(target, TapKeeper(script), InTurn(3, 0), mesh=mesh)
    assert tokens == plain
    assert told.num_compared > 500


@pytest.mark.filterwarnings("ignore:drafter .* is turned off")
@pytest.mark.parametrize("turns_off", [False, True], ids=["on", "turned off"])
def test_shared_pages_are_never_written_again(target, script, turns_off):
    """Several rows wait beside one that decodes, to feed the last token they share once more."""
    told = Told(target, (2, 0), MAX_LENGTH)
    long = dataclasses.replace(SAMPLING, max_tokens=44)
    with specjax.Engine(
        target,
        drafter=TapKeeper(script),
        num_speculative_tokens=3,
        engine=ENGINE,
        policy=InTurn(3, 0, 0, 2),
    ) as engine:
        engine.add([5], long)
        first = engine.add(SAME, dataclasses.replace(SAMPLING, max_tokens=2))
        while not any(chunk.prompt_index == first and chunk.completion for chunk in engine.step()):
            pass
        for last in (30, 31, 32):
            engine.add([*SAME, last], SAMPLING)
        run = engine._loop._run
        while engine.has_work:
            engine.step()
            waits = [row for row in run.scheduler.occupied if row.num_to_prefill]
            if turns_off and waits and not run.faults.is_drafter_off:
                run.turn_drafter_off("somebody asked")
            told.check_full_pages(run)
    assert run.faults.is_drafter_off == turns_off


def test_ranked_drafts(target, plain, script):
    """Fewer nodes are verified than rows may draft."""
    policy = InTurn(3, 0, 3, max_drafts=6)
    told, tokens, _ = run(target, TapKeeper(script), policy)
    assert tokens == plain
    assert told.num_compared > 300


class Failing(TapKeeper):
    """Cannot take what K = 0 gives it to absorb."""

    def build(self, context):
        right = super().build(context)

        def absorb(params, state, fed, next_token_ids, taps, row_ids, max_tokens_per_row):
            if max_tokens_per_row == ENGINE.burst_steps and len(row_ids) == ENGINE.max_rows:
                raise MemoryError("a window is too much")
            told = fed, next_token_ids, taps, row_ids, max_tokens_per_row
            return right.absorb(params, state, *told)

        return right._replace(absorb=absorb)


def test_a_drafter_that_cannot_absorb_is_turned_off(target, plain):
    """In mid-run, with rows that were admitted and share pages: their prompts go on."""
    engine = dataclasses.replace(ENGINE, row_buckets=())
    arguments = dict(drafter=Failing(CHAIN), engine=engine, policy=InTurn(2, 2, 0))
    with specjax.Engine(target, num_speculative_tokens=2, **arguments) as running:
        with pytest.warns(UserWarning, match="a window is too much"):
            tokens = drain(running, add_all(running))
        assert tokens == plain
        assert running._loop._run.faults.is_drafter_off
        assert_engine_is_empty(running)


def test_a_tap_that_is_no_layer_turns_the_drafter_off(target, plain):
    layers = 0, target.config.num_layers + 2
    expected = pytest.warns(UserWarning, match=r"taps=\(0, 4\) must lie from -3 to 3")
    with (
        expected,
        specjax.Engine(target, drafter=TapKeeper(CHAIN, layers), engine=ENGINE) as engine,
    ):
        assert drain(engine, [engine.add(PROMPTS[0], SAMPLING)]) == plain[:1]


def test_k_0_without_taps_is_one_executable_for_all(target):
    """Plain decoding beside a drafter that absorbs nothing is that of the target alone."""
    with specjax.Engine(target, drafter=CHAIN, engine=ENGINE) as engine:
        decoder = engine._loop._run.decoder
        state = engine._loop._run.device_state
        assert decoder._home(state, Bucket(2, 0)) is decoder.plain is not decoder
        assert decoder.step_spec(3).taps == ()


def stopping(target, plain):
    """Returns parameters by which every request stops at a token of its own in mid-text."""
    return [
        dataclasses.replace((SAMPLING, GREEDY)[i % 2], ignore_eos=False, stop_token_ids=(text[7],))
        for i, text in enumerate(plain)
    ]


@pytest.mark.goodput
def test_rows_that_stop_in_mid_draft_under_the_default_policy(target, plain, script):
    told = Told(target, (2, 0), MAX_LENGTH)
    with specjax.Engine(
        target, drafter=TapKeeper(script), num_speculative_tokens=3, engine=ENGINE
    ) as engine:
        ids = [engine.add(*each) for each in zip(PROMPTS, stopping(target, plain))]
        tokens = drain(engine, ids, lambda: told.check(engine))
        assert_engine_is_empty(engine)
    assert tokens == [text[: text.index(text[7]) + 1] for text in plain]
    assert told.num_compared > 100


def test_a_row_whose_logits_are_nan(target, script):
    """It ends with an error, and its neighbours' drafter goes on being told."""
    embedding = target.params["embed_tokens"]
    params = {**target.params, "embed_tokens": embedding.at[50].set(np.nan)}
    poisoned = dataclasses.replace(target, params=params)
    told = Told(target, (2, 0), MAX_LENGTH)
    arguments = dict(num_speculative_tokens=3, engine=ENGINE, policy=InTurn(3, 0, 2))
    with specjax.Engine(poisoned, drafter=TapKeeper(script), **arguments) as engine:
        first = engine.add([3, 50, 7], SAMPLING)
        errors = []
        engine.add(PROMPTS[0], SAMPLING)
        while engine.has_work:
            errors += [chunk.prompt_index for chunk in engine.step() if chunk.error]
            if engine.has_work and errors:
                told.check(engine)
        assert_engine_is_empty(engine)
    assert errors == [first]
    assert told.num_compared > 20


def test_rollouts_with_new_weights(target, script):
    """Tokens are those of plain decoding under each call's weights, and are scored so."""
    newer = jax.tree.map(lambda leaf: leaf * 1.03, target.params)
    sampling = dataclasses.replace(SAMPLING, max_tokens=12)
    made = {}
    for name, drafter in (("plain", None), ("taps", TapKeeper(script))):
        decoder = specjax.build_decoder(
            target, drafter=drafter, num_speculative_tokens=3 * bool(drafter), engine=ENGINE
        )
        made[name] = [
            specjax.rollout(decoder, params, PROMPTS[:4], num_samples=2, sampling=sampling)
            for params in (target.params, newer, target.params)
        ]
        scored = specjax.score(decoder, newer, made[name][1])
        mask = np.asarray(made[name][1].completion_mask)
        own = np.asarray(made[name][1].logprobs.tempered)[mask]
        np.testing.assert_allclose(np.asarray(scored.tempered)[mask], own, atol=1e-4)
    for ours, theirs in zip(made["taps"], made["plain"], strict=True):
        np.testing.assert_array_equal(ours.completion_ids, theirs.completion_ids)


# What a mistake in telling would look like, each made in one place.


def shifted(monkeypatch):
    """Token j is told with the hidden state of token j + 1."""
    right = absorb.absorb

    def wrong(spec, params, state, batch, taps, row_ids, max_tokens_per_row):
        taps = tuple(jax.numpy.roll(tap, -1, axis=0) for tap in taps)
        return right(spec, params, state, batch, taps, row_ids, max_tokens_per_row)

    monkeypatch.setattr(absorb, "absorb", wrong)


def of_rejected_nodes(monkeypatch):
    """Hidden states are those of other nodes than the accepted ones."""
    monkeypatch.setattr(
        burst,
        "absorb_committed",
        lambda spec, params, state, committed: absorb.absorb_committed(
            spec, params, state, committed._replace(places=committed.places[:, ::-1])
        ),
    )


def lost_at_k_0(monkeypatch):
    """Steps of K = 0 are not told."""
    monkeypatch.setattr(burst, "absorb_waiting", lambda spec, params, state, waiting: state)


def of_the_row_before(monkeypatch):
    """The last token of shared pages is not fed again: its pair is what the page held before."""
    right = run_state.RunState.ensure_state

    def wrong(self):
        right(self)
        self.scheduler.feeds_shared_again = False

    monkeypatch.setattr(run_state.RunState, "ensure_state", wrong)


def lost_beside(monkeypatch):
    """Prompts beside rows that decode are not told."""
    right = mixed.take_prompt

    def wrong(spec, params, state, *arguments, taps):
        return right(spec, params, state, *arguments, taps=tuple(0 * tap for tap in taps))

    monkeypatch.setattr(mixed, "take_prompt", wrong)


@pytest.mark.parametrize(
    "mistake",
    quick(
        [shifted, of_rejected_nodes, lost_at_k_0, of_the_row_before, lost_beside],
        slow=[of_rejected_nodes, of_the_row_before, lost_beside],
    ),
)
def test_a_mistake_is_seen(target, script, monkeypatch, mistake):
    shared_decoder.cache_clear()
    mistake(monkeypatch)
    # Another keeper than elsewhere: nothing that was compiled before is right for it.
    spec = TapKeeper(script, layers=(1, -1))
    try:
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            run(target, spec, InTurn(3, 0, 0, 2))
    finally:
        shared_decoder.cache_clear()
