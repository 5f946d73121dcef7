"""A decoder of Python integers: a model whose next token depends on every token before it.

A slot holds a number made of all tokens up to its own. Before a row reads, the fake
compares what its pages hold with what they must, so that one page given away too
early, or shared wrongly, or not filled, fails the test.
"""

import dataclasses
import itertools
from typing import Any

import numpy as np

from specjax.config.engine import EngineConfig
from specjax.decode.sizes import PromptSizes, Sizes
from specjax.drafters.base import DrafterSpec
from specjax.types import OUT_OF_LENGTH, StepInfo

PAGE_SIZE = 4
BURST_STEPS = 5
VOCAB = 50
DRAFT = -7  # what a slot holds after a draft was written there


NOTHING = 17  # the number of no tokens


def mix(number, token):
    """Returns the number of some tokens and one more, from theirs."""
    return (int(number) * 1_000_003 + int(token) + 1) % (2**61 - 1)


def digest(token_ids):
    """Returns a number for each prefix of some tokens, of one token and more."""
    return list(itertools.accumulate(token_ids, mix, initial=NOTHING))[1:]


def continuation(prompt, count):
    """Returns the `count` tokens that follow a prompt."""
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(digest(token_ids)[-1] % VOCAB)
    return token_ids[len(prompt) :]


class FakeDecoder:
    """What the loop calls of a Decoder; drafts are right about every second time."""

    defers = False
    num_warm_ups = 0

    def __init__(
        self,
        *,
        rows=2,
        num_pages=64,
        num_shards=1,
        pages_per_row=256,
        tree_slots=0,
        **engine,
    ):
        self.sizes = Sizes(
            rows=rows,
            page_size=PAGE_SIZE,
            num_pages=num_pages,
            pages_per_row=pages_per_row,
            burst_steps=BURST_STEPS,
            tree_slots=tree_slots,
        )
        self.num_shards, self.kept_shape = num_shards, None
        self.engine_config = EngineConfig(**engine)
        self.prompt_sizes = PromptSizes((64, 256), 16)
        self.compile_s = self.now_s = self.burst_compile_s = 0.0
        shard_slots = num_pages // num_shards * PAGE_SIZE
        self.slots = np.full((num_shards, shard_slots), -1, np.int64)
        self.history = np.zeros((rows, self.sizes.max_length), int)
        self.length, self.end = np.zeros((2, rows), int)
        self.is_active = np.zeros(rows, bool)
        self.admitted, self.prefills, self.bursts, self.mixed_calls = [], [], [], []
        self.num_rows_run = []  # of every call
        self.version = 0  # of the state: an old one has been donated

    @property
    def drafter(self):
        return DrafterSpec()

    mesh = None

    def place_params(self, params):
        return params

    def let_go(self):
        pass

    def expect(self, values):
        pass

    def init(self, *, has_drafter=True):
        return FakeState(self.version)

    def admit(self, state, admission):
        new = {}
        for place, row in self._rows(admission.row_ids):
            self.history[row] = admission.history[place]
            self.length[row] = admission.lengths[place]
            self.end[row] = admission.max_lengths[place]
            self.is_active[row] = False
            new[int(admission.history[place, 0])] = int(row)
        self.admitted.append(new)
        return self._next(state)

    def prefill(self, params, state, block_table, row_ids, counts, *, num_tokens):
        self.prefills.append((num_tokens, row_ids.tolist(), counts.tolist()))
        self._feed(block_table, row_ids, counts, num_tokens)
        return self._next(state), np.int32(0)

    def mixed(
        self,
        params,
        state,
        plan,
        row_ids,
        counts,
        *,
        num_tokens,
        num_speculative_tokens=0,
        max_drafts=None,
    ):
        assert plan.num_steps == 1
        self.mixed_calls.append((num_speculative_tokens, row_ids.tolist(), counts.tolist()))
        result = self._steps(plan, num_speculative_tokens)
        for _, row in self._rows(row_ids):
            assert not self.is_active[row], "a row decodes and is prefilled at once"
        self._feed(plan.block_table, row_ids, counts, num_tokens)
        return self._next(state), *result

    def is_compiled(self, params, state, bucket, beside=None):
        return True

    def is_any_coming(self):
        return False

    def is_coming(self, params, state, bucket, beside=None):
        return False

    def read_s(self, params, state, bucket, beside=None):
        return 0.0

    def prepare(self, params, state, bucket, beside=None):
        raise AssertionError("everything is compiled")

    def raise_failed(self):
        pass

    def compiled_between(self, start, end):
        return False

    def burst(self, params, state, plan, *, num_speculative_tokens, max_drafts=None):
        self.bursts.append((num_speculative_tokens, plan))
        self.now_s += 2.0
        if len(self.bursts) == 1:
            self.now_s, self.compile_s = self.now_s + 7.0, self.compile_s + 7.0
        return self._next(state), *self._steps(plan, num_speculative_tokens)

    def _next(self, state):
        assert state.version == self.version, "a donated state was used again"
        self.version += 1
        return dataclasses.replace(state, version=self.version)

    def _rows(self, row_ids):
        """Yields (place, row of the whole batch) of the places in use."""
        rows = self.sizes.rows // self.num_shards
        for place, own in enumerate(row_ids):
            if own < rows:
                yield place, place // (len(row_ids) // self.num_shards) * rows + own

    def _slot(self, table, row, position):
        page = table[row, position // PAGE_SIZE]
        assert page >= 0, f"{row=} has no page for {position=}"
        shard = row // (self.sizes.rows // self.num_shards)
        return shard, page * PAGE_SIZE + position % PAGE_SIZE

    def mix(self, number, token):
        """Returns the number of a row's tokens from those before it, and its newest token."""
        return mix(number, token)

    def _before(self, table, row, position):
        """Returns the number that the row's slot before a position holds."""
        return self.slots[self._slot(table, row, position - 1)] if position else NOTHING

    def _check(self, table, row):
        """Asserts that the row's pages hold its tokens' numbers up to its length."""
        length = self.length[row]
        held = [self.slots[self._slot(table, row, i)] for i in range(length)]
        assert held == digest(self.history[row, :length]), f"{row=} reads wrong pages"

    def _feed(self, table, row_ids, counts, num_tokens):
        by_shard = counts.reshape(self.num_shards, -1)
        assert np.all(by_shard.sum(axis=1) <= num_tokens)
        assert self.prompt_sizes.places(num_tokens, self.sizes.rows) >= by_shard.shape[1]
        for place, row in self._rows(row_ids):
            count, length = counts[place], self.length[row]
            assert count > 0
            self._check(table, row)
            number = self._before(table, row, length)
            for position in range(length, length + count):
                number = self.mix(number, self.history[row, position])
                self.slots[self._slot(table, row, position)] = number
            self.length[row] += count

    def _steps(self, plan, depth):
        all_rows, width = self.sizes.rows, depth + 1
        places = {row: row for row in range(all_rows)}
        if plan.row_ids is not None:
            places = {row: place for place, row in self._rows(plan.row_ids)}
        rows = all_rows if plan.row_ids is None else len(plan.row_ids)
        self.num_rows_run.append(rows)
        self.is_active = (self.is_active | plan.activate) & plan.keep
        shape = BURST_STEPS, rows
        count, finish, accepted, drafted, lengths = np.zeros((5, *shape), np.int32)
        fault = np.zeros(shape, np.int32)
        token_ids = np.zeros((*shape, width), np.int32)
        num_run = 0
        while num_run < plan.num_steps and self.is_active.any():
            step, num_run = num_run, num_run + 1
            for row in np.flatnonzero(self.is_active):
                place = places[row]
                self._check(plan.block_table, row)
                length = self.length[row]
                room = self.end[row] - length - 1
                own = min(depth, room - 1, int(plan.draft_caps[row]))
                number = self._before(plan.block_table, row, length)
                numbers, new = [], [self.history[row, length]]
                for _ in range(width):
                    number = self.mix(number, new[-1])
                    numbers.append(number)
                    new.append(number % VOCAB)
                del new[0]
                # Drafts, some of which turn out right.
                for ahead in range(own + 1):
                    slot = self._slot(plan.block_table, row, length + ahead)
                    self.slots[slot] = DRAFT
                num_right = numbers[0] // VOCAB % (own + 1)
                gained = min(num_right + 1, room)
                for ahead, number in enumerate(numbers[:gained]):
                    self.slots[self._slot(plan.block_table, row, length + ahead)] = number
                self.history[row, length + 1 : length + 1 + gained] = new[:gained]
                self.length[row] += gained
                token_ids[step, place] = new
                count[step, place], drafted[step, place] = gained, own
                accepted[step, place] = min(num_right, gained)
                lengths[step, place] = self.length[row]
                if gained == room:
                    finish[step, place] = OUT_OF_LENGTH
                    self.is_active[row] = False
            if plan.stop_when_finished and finish[step].any():
                break
        info = StepInfo(
            token_ids=token_ids,
            num_committed=count,
            num_accepted=accepted,
            num_drafted=drafted,
            draft_depth=drafted,
            proposed_depth=drafted,
            finish=finish,
            drafter_lengths=lengths,
            drafter_fault=fault,
            logprobs=None,
        )
        return info, np.int32(num_run)


@dataclasses.dataclass(frozen=True)
class FakeState:
    """Stands for the device's state; the drafter has nothing on the device."""

    version: int
    drafter: Any = ()
    kept: Any = ()
