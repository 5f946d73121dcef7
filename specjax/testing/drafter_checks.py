"""Checks the contract that every drafter must satisfy.

A faulty drafter is slow, not wrong, and its output does not reveal the fault. Under rules that
compare distributions, probabilities (`Proposal.probs`) that are not true change the output, and
only many draws reveal that. The check compares the drafts themselves: those of a row that was
prefilled, drafted, preempted and reused must equal those of a fresh row with the same tokens, and
probabilities must be those of what was drawn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.config.checks import is_int
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.config.speculation import MAX_DEPTH
from specjax.decode import state as decode_state
from specjax.decode.config import DecoderConfig
from specjax.decode.decoder import Decoder, shared_decoder
from specjax.decode.prefill import prefill
from specjax.decode.sizes import Sizes
from specjax.decode.state import DecodeState
from specjax.drafters import base
from specjax.drafters.base import Draft, Drafter, DrafterContext, resolve_taps
from specjax.drafters.guard import DrafterError, guarded
from specjax.drafters.spec import NoDrafter
from specjax.engine.admission import make_admission
from specjax.engine.faults import what_it_proposed
from specjax.engine.request import Request
from specjax.engine.rows import Row
from specjax.engine.text_feed import TextFeed
from specjax.heads.loading import DrafterSource, LoadedDrafter, load_drafter
from specjax.models.base import Model
from specjax.paged.kv_cache import own_pages
from specjax.runtime.progress import Progress
from specjax.sampling import row_values
from specjax.sampling.row_sampling import seed_words
from specjax.types import GREEDY, NOT_A_TOKEN, REJECTION, SEEDED, BurstPlan, DecoderParams, Proposal

ROWS, PAGE_SIZE, BURST_STEPS = 4, 8, 2
WIDTH = 16  # prompt tokens of a row that are fed at once
BUCKET = 2  # rows of the smaller row bucket
NUM_DRAWS = 64  # drafts of four rows each, to test distributions
# A sum of independent draws deviates by more standard errors once in two million times.
STANDARD_ERRORS = 5
# Laws of equal texts differ by the rounding of other shapes.
LAW_RTOL, LAW_ATOL = 1e-3, 1e-4
ENGINE = EngineConfig(
    page_size=PAGE_SIZE,
    max_rows=ROWS,
    burst_steps=BURST_STEPS,
    max_bias_entries=1,
    max_allowed_tokens=1,
)
# A text with a period, one token, one token again and again, more than one chunk, and one that
# is told apart from the first, whose row it gets, by what follows one of its tokens. The last
# begins with two pages of the fourth.
MOST_STEPS = 12  # that any request takes, of which at most 8 draft
PROMPTS = (
    [1, 2, 3, 1, 2, 3, 1, 2],
    [5],
    [4, 4, 4, 9, 4, 4],
    [7, 8] * 9,
    [2, 5, 2, 6, 2, 6, 2],
    [*[7, 8] * 8, 3, 7],
)


def check_drafter(
    drafter: DrafterSource, target: Model, *, num_speculative_tokens: int = 3
) -> None:
    """Runs a drafter through everything that can happen to rows, and compares its drafts.

    Prompts are prefilled in chunks and beside decoding rows; rows draft, decode at K = 0 and draft
    again, in two row buckets; one request is preempted and continues in another row; rows are
    reused; one row reads pages that another filled.

    - Every function returns a state of one structure, and is traced once per bucket.
    - Greedy and seeded output equals plain decoding token for token.
    - The pages of the state take `DrafterSpec.bytes_per_token`.
    - No proposal holds NaN, a token outside the vocabulary, or more tokens than were asked for.
    - Drafts of a row equal those of a fresh row with the same tokens. Where the spec says that it
      `learns`, they equal those of the same rows when all is run again.
    - Its weights are those that `abstract_params` says, and `work` is a tuple of ModelWork.
    - Laws (`Proposal.probs`) sum to 1, and the first draft is drawn from its law.
    - `prior_confidence`, and how many tokens are proposed, depend on nothing drawn later
      (non-anticipation), where laws are compared.

    Args:
      drafter: as `generate` takes it.
      target: a small model with float32 weights, of at least 10 tokens: some ten functions are
        compiled for it. Laws are told apart only where its texts and the drafter's laws differ.
      num_speculative_tokens: K, at least 1.

    Raises:
      AssertionError: it says which of these does not hold.
      ValueError, TypeError: as of `load_drafter`; weights, `work` or the numbers of nodes and
        slots are none that can be; K is 0, where nothing is drafted.
    """
    if not is_int(num_speculative_tokens) or num_speculative_tokens < 1:
        raise ValueError(
            f"num_speculative_tokens={num_speculative_tokens!r} must be a whole number of at "
            "least 1: without drafts there is nothing to check."
        )
    loaded = load_drafter(drafter, target)
    try:
        with contextlib.closing(Progress()) as progress:
            progress.report("checking the drafter", 0, 0)
            _Check(loaded, target, num_speculative_tokens).run()
    except (AssertionError, DrafterError) as error:
        raise AssertionError(f"drafter {loaded.name!r}: {error}") from error


class _Rows:
    """A decoder's state, driven by hand, and the requests in its rows.

    Args:
      seed: of the numbers that the drafter's pages hold, as pages do that others had before.
    """

    def __init__(self, decoder: Decoder, params: DecoderParams, seed: int = 0):
        self.decoder = decoder
        self.params = params
        state = decoder.init()
        rng = np.random.default_rng(seed)
        used = lambda leaf, axes: _used(leaf, rng) if "pages" in tuple(axes) else leaf
        drafter = jax.tree.map(used, state.drafter, decoder.drafter_axes(state))
        self.state = dataclasses.replace(state, drafter=drafter)
        self.table = own_pages(ROWS, decoder.sizes.pages_per_row)
        self.rows: list[Row | None] = [None] * ROWS
        self._feed = TextFeed(ROWS) if decoder.drafter.takes_text else None
        self._is_new = np.zeros(ROWS, bool)

    def enter(
        self,
        texts: dict[int, Row],
        *,
        pages_of: tuple[int, int] | None = None,
        is_level: bool = True,
    ) -> None:
        """Puts requests with their tokens into rows, replacing what these held, without feeding
        any token.

        Args:
          pages_of: a row whose first pages the requests share, and how many; None: no sharing.
          is_level: whether the drafter counts as having seen these pages; if not, it catches up.
        """
        other, num_pages = pages_of or (0, 0)
        num_shared = num_pages * PAGE_SIZE
        # The last token that is shared is fed again for its hidden states.
        feeds_again = bool(self.decoder.drafter.taps) and num_shared > 0 and is_level
        own = own_pages(ROWS, self.table.shape[1])
        self.table = self.table.copy()  # what was sent may still read the one before
        for index, text in texts.items():
            before = self.rows[index]
            if before is not None and self._feed is not None:
                prompt = before.request.prompt_token_ids
                self._feed.cut(prompt, before.token_ids[len(prompt) :])
            self.table[index] = own[index]
            self.table[index, :num_pages] = self.table[other, :num_pages]
            num_drafter = num_shared if is_level else 0
            self.rows[index] = Row(
                index, 0, text.request, text.token_ids, num_shared - feeds_again, num_drafter
            )
            self._is_new[index] = True
        entered = [row for row in self.rows if row is not None and row.index in texts]
        self.state = self.decoder.admit(self.state, make_admission(self.decoder, [entered], ROWS))

    def feed(self) -> None:
        """Feeds all prompt tokens of rows that entered, in chunks."""
        while (chunk := self._next_chunk()) is not None:
            self.state, _ = self.decoder.prefill(
                self.params, self.state, self.table, *chunk, num_tokens=ROWS * WIDTH
            )

    def feed_beside(self, num_speculative_tokens: int) -> None:
        """Feeds the next chunk while the other rows take one step at a K."""
        chunk = self._next_chunk()
        assert chunk is not None
        if num_speculative_tokens:
            self._tell()
        plan = self._plan(1, activates=False)
        self.state, report, _ = self.decoder.mixed(
            self.params,
            self.state,
            plan,
            *chunk,
            num_tokens=ROWS * WIDTH,
            num_speculative_tokens=num_speculative_tokens,
        )
        self._take(report, 1, range(ROWS))

    def _next_chunk(self) -> tuple[np.ndarray, np.ndarray] | None:
        counts = np.zeros(ROWS, np.int32)
        for row in self.rows:
            if row is not None and self._is_new[row.index]:
                counts[row.index] = min(row.num_to_prefill, WIDTH)
                row.num_prefilled += int(counts[row.index])
        return (np.arange(ROWS, dtype=np.int32), counts) if counts.any() else None

    def decode(
        self,
        num_speculative_tokens: int,
        num_steps: int,
        *,
        rows: Sequence[int] | None = None,
        caps: Sequence[int] | None = None,
    ) -> None:
        """Runs a burst, after all prompts were fed.

        Args:
          rows: rows of a smaller row bucket; None: all rows.
          caps: most tokens that each row drafts; None: K.
        """
        if num_speculative_tokens:
            self._tell()
        plan = self._plan(num_steps, caps=caps, rows=rows)
        self.state, report, num_run = self.decoder.burst(
            self.params, self.state, plan, num_speculative_tokens=num_speculative_tokens
        )
        self._is_new[:] = False
        self._take(report, int(num_run), range(ROWS) if rows is None else rows)

    def _tell(self) -> None:
        """Gives a drafter that matches text what ended since it was told last."""
        while self._feed and (pieces := self._feed.next_pieces(self.rows)) is not None:
            self.state = self.decoder.remember(self.state, pieces)

    def _plan(
        self,
        num_steps: int,
        *,
        activates: bool = True,
        caps: Sequence[int] | None = None,
        rows: Sequence[int] | None = None,
    ) -> BurstPlan:
        return BurstPlan(
            num_steps=np.int32(num_steps),
            stop_when_finished=np.bool_(False),
            activate=self._is_new & activates,
            keep=np.array([row is not None for row in self.rows]),
            block_table=self.table,
            draft_caps=np.array([MAX_DEPTH] * ROWS if caps is None else caps, np.int32),
            row_ids=None if rows is None else np.array(rows, np.int32),
        )

    def _take(self, report: Any, num_steps: int, rows: Sequence[int]) -> None:
        """Reads back what a burst committed."""
        fault = int(np.max(np.asarray(report.drafter_fault)[:num_steps], initial=0))
        assert not fault, what_it_proposed(fault)
        tokens, counts = np.asarray(report.token_ids), np.asarray(report.num_committed)
        for step in range(num_steps):
            for place, index in enumerate(rows):
                if row := self.rows[index]:
                    row.token_ids.extend(tokens[step, place, : counts[step, place]].tolist())


class _Check:
    def __init__(self, loaded: LoadedDrafter, target: Model, num_speculative_tokens: int):
        self.loaded = loaded
        self.spec = loaded.spec
        self.target = target
        self.depth = num_speculative_tokens if self.spec.can_draft else 0
        if loaded.max_depth is not None:
            self.depth = min(self.depth, loaded.max_depth)
        self.max_length = max(map(len, PROMPTS)) + MOST_STEPS * (1 + num_speculative_tokens)
        self.params = DecoderParams(target.params, loaded.params)
        self.compares_laws = self.spec.has_probs and not self.spec.is_grown
        dtype = jax.tree.leaves(target.params)[0].dtype
        loaded.check_params(target.config, dtype)
        loaded.work(target.config, dtype)
        slots = loaded.tree_slots(self.depth)
        self.sizes = self._sizes(-(-(self.max_length + slots) // PAGE_SIZE))
        self._seeds = itertools.count()
        # Proposals of a drafter that learns: of the script played before, and played now.
        self._before: list[Proposal] = []
        self._now: list[Proposal] = []
        # A decoder of its own: what it traces is counted.
        self.decoder = Decoder(
            DecoderConfig(target=target.config, drafter=self.spec, sizes=self.sizes, engine=ENGINE)
        )
        self.params = self.decoder.with_made_weights(self.params)
        self.drafter = self._build()

    def _sizes(self, pages_per_row: int) -> Sizes:
        leaves = jax.tree.leaves(self.params.target)
        return Sizes(
            rows=ROWS,
            page_size=PAGE_SIZE,
            num_pages=ROWS * pages_per_row,
            pages_per_row=pages_per_row,
            burst_steps=BURST_STEPS,
            dtype=leaves[0].dtype,
        )

    def _build(self, *, keeps_probs: bool = False, says_confidence: bool = False) -> Drafter:
        config = self.target.config
        context = DrafterContext(
            target=config,
            num_speculative_tokens=max(self.depth, 1),
            dtype=self.sizes.dtype,
            taps=resolve_taps(self.spec.taps, config.num_layers),
            keeps_probs=keeps_probs,
            says_confidence=says_confidence,
        )
        return guarded(self.spec.build(context), self.spec, context)

    def run(self) -> None:
        self.check_structure()
        if self.depth:
            self.check_draws()  # before what compiles more
        self.check_rows()

    def new_rows(self) -> _Rows:
        """Returns empty rows, with other numbers in the drafter's pages than any before."""
        return _Rows(self.decoder, self.params, next(self._seeds))

    # One structure

    def check_structure(self) -> None:
        """Every function returns a state of the structure, shapes and dtypes of `init`."""
        rows = self.new_rows()
        state, drafter = rows.state, self.drafter
        expected = jax.eval_shape(lambda: state.drafter)
        self.check_bytes(expected)
        told = self.decoder.step_spec(0, absorbs=bool(self.spec.taps))
        ids = jnp.arange(ROWS, dtype=jnp.int32)
        admission = make_admission(self.decoder, [[self.text(0)]], ROWS)
        some, table = ids[:BUCKET], jnp.asarray(rows.table)

        def fed(num_speculative_tokens: int, state: decode_state.DecodeState) -> Any:
            spec = dataclasses.replace(
                told, drafter=drafter, num_speculative_tokens=num_speculative_tokens
            )
            feed = functools.partial(prefill, spec, num_tokens=ROWS * WIDTH)
            return feed(self.params, state, table, ids, ids).drafter

        calls = {
            "enter_rows": lambda state: decode_state.admit(state, drafter, admission).drafter,
            "absorb" if self.spec.taps else "prefill": functools.partial(fed, 1),
            "draft": lambda state: self.propose(state, ids).state,
            "move": lambda state: drafter.move(state.drafter, ids, ids),
            "state_axes": lambda state: base.put_rows(
                drafter, state.drafter, some, base.take_rows(drafter, state.drafter, some)
            ),
        }
        if drafter.defer is not None:
            calls["defer"] = functools.partial(fed, 0)
        for name, call in calls.items():
            found = jax.eval_shape(call, state)
            assert _described(found) == _described(expected), (
                f"{name} returns a state of other structure, shapes or dtypes than init: "
                f"{_described(found)}; expected {_described(expected)}."
            )

    def check_bytes(self, state: Any) -> None:
        """The spec says how many bytes the drafter's pages take: memory is planned by it."""
        leaves = jax.tree.leaves(state), jax.tree.leaves(self.drafter.state_axes(state))
        paged = [leaf for leaf, names in zip(*leaves) if "pages" in tuple(names)]
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in paged)
        per_token = held / (self.sizes.num_pages * PAGE_SIZE)
        said = self.spec.bytes_per_token(self.target.config, self.sizes.dtype)
        assert math.isclose(said, per_token), (
            f"bytes_per_token says {said}, and its pages take {per_token:g} bytes per token; "
            "memory is planned by what it says."
        )

    # What happens to rows

    def check_rows(self) -> None:
        """Drafts along a script of all that happens to rows, and the texts that come of it."""
        texts = self.play()
        if self.spec.learns:
            self._before, self._now = self._now, []
            self.play()
        self.check_output(texts)
        self.check_traces()
        self.decoder.let_go()

    def play(self) -> list[Row]:
        """Plays the script, looks at the drafts between its steps, and returns the texts."""
        depth, some = self.depth, [2, 0]
        texts = [self.text(number) for number in range(len(PROMPTS))]
        rows = self.new_rows()
        rows.enter({0: texts[0], 1: texts[1], 2: texts[2]})
        rows.feed()
        rows.decode(depth, 2)
        self.check_drafts(rows, "after drafting")
        rows.decode(0, 2)
        rows.decode(0, 2)
        self.check_drafts(rows, "after steps at K = 0")
        rows.decode(depth, 1, caps=[depth, 0, 1, 0])
        self.check_drafts(rows, "after a row did not draft that decoded at K = 0 before")
        rows.decode(depth, 2, rows=some)
        self.check_drafts(rows, "after steps in a smaller row bucket")
        # The second request is preempted, and comes back in another row; its own is reused.
        rows.enter({3: texts[1], 1: texts[3]})
        rows.feed_beside(depth)
        rows.feed()
        self.check_drafts(rows, "after preemption, reuse of a row and a mixed step that drafted")
        rows.decode(depth, 1)
        self.check_drafts(rows, "after drafting in a row that was reused")
        rows.decode(depth, 2, caps=[depth, 1, 0, depth])
        self.check_drafts(rows, "after rows were capped")
        # Nothing drafts while this row is empty: a drafter may find out then that its text is new.
        rows.enter({0: texts[4]})
        rows.feed_beside(0)
        rows.feed()
        self.check_drafts(rows, "after another row was reused, and a mixed step")
        rows.decode(depth, 1)
        self.check_drafts(rows, "after drafting in another row that was reused")
        # The first two pages of the fourth request, which row 1 holds, are the sixth's too.
        rows.enter({2: texts[5]}, pages_of=(1, 2))
        rows.feed()
        self.check_drafts(rows, "after a row came to read the pages of another")
        rows.decode(depth, 1)
        self.check_drafts(rows, "after drafting in a row that reads the pages of another")
        if not self.spec.taps or self.decoder.defers:
            rows.enter({2: texts[4]})
            rows.enter({0: texts[5]}, pages_of=(1, 2), is_level=False)
            rows.feed()
            self.check_drafts(rows, "after a row came to read pages that the drafter had not seen")
        return texts

    def text(self, number: int) -> Row:
        """Returns a request that is in no row yet; some are greedy, some sampled."""
        is_greedy = number in (1, 3)
        rule = GREEDY if is_greedy else SEEDED
        vocab_size = self.target.config.vocab_size
        prompt = [token % vocab_size for token in PROMPTS[number]]
        return self.text_of(prompt, 0.0 if is_greedy else 0.8, number, rule)

    def text_of(self, prompt: list[int], temperature: float, seed: int, rule: int) -> Row:
        params = SamplingParams(temperature=temperature, max_tokens=self.max_length - len(prompt))
        request = Request(
            prompt_index=0,
            sample_index=0,
            prompt_token_ids=prompt,
            params=params,
            seed=seed,
            draft_cap=self.depth,
            rule=rule,
            max_length=self.max_length,
            sampling_values=row_values(
                params,
                prompt_length=len(prompt),
                eos_token_ids=(),
                seed=seed,
                engine_config=ENGINE,
            ),
        )
        return Row(0, 0, request, [*prompt], 0, 0)

    def check_output(self, texts: Sequence[Row]) -> None:
        """Greedy and seeded texts are those of plain decoding."""
        config = DecoderConfig(
            target=self.target.config,
            drafter=NoDrafter(),
            sizes=self._sizes(-(-self.max_length // PAGE_SIZE)),
            engine=ENGINE,
        )
        decoder = shared_decoder(config)
        for first in range(0, len(texts), ROWS):
            part = texts[first : first + ROWS]
            plain = _Rows(decoder, DecoderParams(self.params.target))
            again = [_from(text, text.request.prompt_token_ids) for text in part]
            plain.enter(dict(enumerate(again)))
            plain.feed()
            while any(len(a.token_ids) < len(t.token_ids) for a, t in zip(again, part)):
                plain.decode(0, BURST_STEPS)
            for own, text in zip(again, part):
                expected = own.token_ids[: len(text.token_ids)]
                assert text.token_ids == expected, (
                    f"a text is {text.token_ids}; plain decoding gives {expected}."
                )
        decoder.let_go()

    def check_traces(self) -> None:
        again = {key: count for key, count in self.decoder.traces.items() if count > 1}
        assert not again, f"traced more than once: {again}."

    # Drafts

    def propose(self, state: DecodeState, caps: Array) -> Draft:
        """Asks the drafter itself, as `specjax.decode.draft` does."""
        return self.drafter.draft(self.params, state.drafter, state, caps)

    @functools.cached_property
    def _propose(self) -> Any:
        return jax.jit(
            lambda params, state, caps: self.drafter.draft(params, state.drafter, state, caps)
        )

    def drafts(self, state: DecodeState, caps: Sequence[int]) -> tuple[Proposal, np.ndarray]:
        """Returns a proposal that holds what it must, and bool[rows, num_drafts]: what stands."""
        draft = self._propose(self.params, state, np.array(caps, np.int32))
        proposal = jax.tree.map(np.asarray, draft.proposal)
        _check_proposal(proposal, np.array(caps), self.target.config.vocab_size)
        num_drafts = proposal.token_ids.shape[1]
        expected = self.loaded.num_nodes(self.depth) - 1
        assert num_drafts == expected, (
            f"it proposes {num_drafts} nodes; its spec's num_nodes says {expected}."
        )
        return proposal, np.arange(num_drafts)[None] < proposal.num_tokens[:, None]

    def check_drafts(self, rows: _Rows, when: str) -> None:
        """The drafts of rows are those of fresh rows with the same tokens, or of the last time."""
        if not self.depth:
            return
        caps = [self.depth if row else 0 for row in rows.rows]
        is_active = jnp.asarray([row is not None for row in rows.rows])
        as_active = lambda state: dataclasses.replace(state, is_active=is_active)
        found, stands = self.drafts(as_active(rows.state), caps)
        if self.spec.learns:
            self._now.append(found)
            if len(self._now) > len(self._before):
                return
            expected = self._before[len(self._now) - 1]
            what = (
                "its drafts are others when all is played again. They may depend on what pages "
                "held before they were the row's, or on the host."
            )
        else:
            expected, _ = self.drafts(as_active(self.fresh(rows)), caps)
            what = (
                "its drafts are not those of a fresh row with the same tokens. Its state may keep "
                "the row before (enter_rows), miss tokens (prefill, written, num_tokens at K = 0), "
                "or be taken and put wrongly (state_axes, move). It may read slots that nothing of "
                "the row was written to, which hold anything: of a drafter with taps slot 0 is "
                "one. If it is to learn from other rows, let its spec say `learns`."
            )
        message = f"{when}: {what}"
        same = functools.partial(np.testing.assert_array_equal, err_msg=message)
        close = functools.partial(
            np.testing.assert_allclose, err_msg=message, rtol=LAW_RTOL, atol=LAW_ATOL
        )
        same(found.num_tokens, expected.num_tokens)
        same(np.where(stands, found.token_ids, 0), np.where(stands, expected.token_ids, 0))
        if found.tree is not None and expected.tree is not None:
            same(
                np.where(stands, found.tree.parents[:, 1:], 0),
                np.where(stands, expected.tree.parents[:, 1:], 0),
            )
        for name in ("prior_confidence", "path_probability"):
            figures = getattr(found, name), getattr(expected, name)
            if figures[0] is not None:
                ours, theirs = (np.where(stands, figure, 0) for figure in figures)
                close(ours, theirs)

    def fresh(self, rows: _Rows) -> DecodeState:
        """Returns a state that was never used, with the same texts in the same rows."""
        fresh = self.new_rows()
        fresh.enter({row.index: _from(row, row.token_ids) for row in rows.rows if row})
        fresh.feed()
        return fresh.state

    # Draws

    def check_draws(self) -> None:
        """Laws, and what depends on draws, over many seeds of two texts."""
        drafter = self.drafter
        self.drafter = self._build(keeps_probs=self.compares_laws, says_confidence=True)
        rows = self.new_rows()
        rule = REJECTION if self.compares_laws else SEEDED
        prompts = [self.text(number).token_ids for number in (0, 2, 0, 2)]
        rows.enter({row: self.text_of(p, 0.6, 0, rule) for row, p in enumerate(prompts)})
        rows.feed()
        state = dataclasses.replace(rows.state, is_active=jnp.ones(ROWS, bool))
        self.drafts(state, [min(cap, self.depth) for cap in range(ROWS)])
        drawn = []
        for number in range(NUM_DRAWS if self.compares_laws else 0):
            words = [seed_words(ROWS * number + row) for row in range(ROWS)]
            seeds = jnp.asarray(np.array(words), state.sampling.seeds.dtype)
            sampling = dataclasses.replace(state.sampling, seeds=seeds)
            proposal, _ = self.drafts(
                dataclasses.replace(state, sampling=sampling), [self.depth] * ROWS
            )
            drawn.append(proposal)
        for text in range(2 if drawn else 0):
            own = [_row(proposal, row) for proposal in drawn for row in (text, text + 2)]
            self.check_no_anticipation(own)
            self.check_law(own)
        self.drafter = drafter
        del self._propose

    def check_law(self, rows: Sequence[Proposal]) -> None:
        """The first draft of rows with the same text has the law that comes with it."""
        rows = [row for row in rows if row.num_tokens > 0]
        if not rows:
            return
        laws = np.array([row.probs[0] for row in rows if row.probs is not None])
        np.testing.assert_allclose(
            laws,
            np.broadcast_to(laws[:1], laws.shape),
            err_msg="rows with the same tokens have first drafts of different laws "
            "(Proposal.probs): do they belong to another row, or know the draw?",
            rtol=LAW_RTOL,
            atol=LAW_ATOL,
        )
        law = laws[0].astype(np.float64)
        tokens = np.array([row.token_ids[0] for row in rows])
        assert np.all(law[tokens] > 0), "it drafts tokens that its law (Proposal.probs) excludes."
        # Every token's count, and sums of signs at random, which see what no single count does.
        vocab = len(law)
        signs = np.random.default_rng(0).choice([-1.0, 1.0], (64, vocab))
        tests = np.concatenate([np.eye(vocab), signs])
        means = tests @ law
        deviations = np.sqrt(np.maximum(tests**2 @ law - means**2, 0) * len(rows))
        surplus = tests[:, tokens].sum(axis=1) - len(rows) * means
        # One count more or less is nothing to wonder at, however unlikely.
        worst = np.max(np.abs(surplus) - STANDARD_ERRORS * deviations)
        assert worst <= 2, (
            f"the first draft of {len(rows)} draws is not distributed as its law (Proposal.probs)."
        )

    def check_no_anticipation(self, rows: Sequence[Proposal]) -> None:
        """Checks that verified tokens do not depend on draws at or after them."""
        num_drafts = rows[0].token_ids.shape[0]
        for place in range(num_drafts):
            seen: dict[tuple[int, ...], tuple[bool, float]] = {}
            for row in rows:
                if row.num_tokens < place:
                    continue
                stands = bool(row.num_tokens > place)
                figure = 0.0
                if stands and row.prior_confidence is not None:
                    figure = float(row.prior_confidence[place])
                before = tuple(row.token_ids[:place].tolist())
                first = seen.setdefault(before, (stands, figure))
                assert stands == first[0], (
                    f"whether draft token {place} is proposed depends on what was drawn there or "
                    "later; rules that compare laws would be biased."
                )
                assert np.isclose(figure, first[1], rtol=LAW_RTOL, atol=LAW_ATOL), (
                    f"prior_confidence of draft token {place} anticipates: it is {first[1]} and "
                    f"{figure} after the same tokens {before}. It may depend on the path before "
                    "the token alone."
                )


def _check_proposal(proposal: Proposal, caps: np.ndarray, vocab_size: int) -> None:
    """Raises AssertionError for a proposal of numpy arrays that breaks the contract."""
    tokens, counts = np.asarray(proposal.token_ids), np.asarray(proposal.num_tokens)
    num_drafts = tokens.shape[1]
    most = caps if proposal.tree is None else np.where(caps > 0, num_drafts, 0)
    assert np.all((counts >= 0) & (counts <= most)), (
        f"it says num_tokens={counts.tolist()}; asked for at most {most.tolist()}."
    )
    stands = np.arange(num_drafts)[None] < counts[:, None]
    ids = tokens[stands]
    assert not np.any(ids == NOT_A_TOKEN), "it proposes NaN."
    assert np.all((ids >= 0) & (ids < vocab_size)), (
        f"it proposes token ids outside the vocabulary of {vocab_size}: {ids.tolist()}."
    )
    for figure in ("prior_confidence", "path_probability"):
        values = getattr(proposal, figure)
        if values is not None:
            own = np.asarray(values)[stands]
            assert np.all((own >= 0) & (own <= 1 + 1e-5)), (
                f"{figure} is not in [0, 1]: {own.tolist()}."
            )
    above = np.broadcast_to(np.arange(num_drafts)[None], tokens.shape)
    if proposal.tree is not None:
        parents, depths = np.asarray(proposal.tree.parents), np.asarray(proposal.tree.depths)
        above = parents[:, 1:]
        nodes = np.arange(1, num_drafts + 1)[None]
        is_before = (above >= 0) & (above < nodes)
        assert np.all(is_before[stands]), (
            f"a node of its tree comes before its parent: {parents.tolist()}."
        )
        expected = 1 + np.take_along_axis(depths, np.maximum(above, 0), axis=1)
        assert np.all((depths[:, 1:] == expected)[stands]), (
            f"depths of its tree are not those of its parents: {depths.tolist()}."
        )
    if proposal.probs is not None:
        sums = np.take_along_axis(
            np.asarray(proposal.probs).sum(axis=2), np.maximum(above, 0), axis=1
        )[stands]
        assert np.allclose(sums, 1, atol=1e-3), f"probs sum to {sums.tolist()}; expected 1."


def _used(pages: Array, rng: np.random.Generator) -> Array:
    """Returns pages of the same shape and dtype with numbers at random."""
    if jnp.issubdtype(pages.dtype, jnp.floating):
        return jnp.asarray(10 * rng.standard_normal(pages.shape)).astype(pages.dtype)
    return jnp.asarray(rng.integers(0, 2, pages.shape)).astype(pages.dtype)


def _from(row: Row, token_ids: Sequence[int]) -> Row:
    """Returns a row's request with some tokens, in no row yet."""
    return Row(0, 0, row.request, [*token_ids], 0, 0)


def _row(proposal: Proposal, row: int) -> Proposal:
    return jax.tree.map(lambda leaf: leaf[row], proposal)


def _described(tree: Any) -> str:
    leaves, structure = jax.tree.flatten(tree)
    return f"{structure} of {[f'{leaf.dtype}{list(leaf.shape)}' for leaf in leaves]}"
