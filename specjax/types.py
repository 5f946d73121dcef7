"""Pytrees that cross module borders."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.ragged import rows_of
from specjax.config.rules import BY_LAW as BY_LAW
from specjax.config.rules import Rule

# An array made on the host: numpy until it enters a compiled function.
HostArray = Any

# Why a row ended, as the device reports it; RUNNING: it has not ended.
RUNNING, STOPPED, OUT_OF_LENGTH, INVALID_LOGITS = range(4)

# Fault of a drafter, as the device reports it; the most serious has the highest number.
NO_FAULT, OUTSIDE_VOCABULARY, NOT_A_NUMBER = range(3)

NO_PARENT = -1  # the root's entry among parents
NOT_A_TOKEN = -(2**31)  # draft token id from logits that hold NaN

# Verification rules as per-row numbers.
GREEDY, SEEDED, DELTA, REJECTION, BLOCK, TRAVERSAL, LENIENT, TYPICAL, SYNTHETIC = Rule


def is_by_law(rules: Array) -> Array:
    """Returns whether each rule of an array is in BY_LAW, elementwise."""
    return (rules >= BY_LAW.start) & (rules < BY_LAW.stop)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Tokens of several rows laid end to end: the input of one forward.

    Row r owns flat indices row_starts[r] to row_starts[r + 1] - 1; those past
    row_starts[-1] are padding, with row_ids == rows and slot_mapping == num_slots.
    """

    token_ids: Array  # i32[num_tokens]
    positions: Array  # i32[num_tokens], rotary positions: lengths + depth
    row_ids: Array  # i32[num_tokens]
    slot_mapping: Array  # i32[num_tokens], where keys and values are written
    row_starts: Array  # i32[rows + 1]
    lengths: Array  # i32[rows], tokens of the row whose KV is final
    block_table: Array  # i32[rows, pages_per_row]
    # Only for trees: bit j is set where the token sees new token j of its row.
    ancestor_bits: Array | None = None  # u32[num_tokens, words], see tree_attention
    num_new_keys: Array | None = None  # i32[rows], see tree_attention
    # Only for trees with a token bucket: the path to each token.
    path_offsets: Array | None = None  # i32[num_tokens, depths], see path_attention

    def first(self, num_tokens: int) -> TokenBatch:
        """Returns a batch of the first so many flat tokens, which are all that rows own."""
        by_row = "row_starts", "lengths", "block_table", "num_new_keys"
        cut = {
            name: x[:num_tokens]
            for name, x in vars(self).items()
            if name not in by_row and x is not None
        }
        return dataclasses.replace(self, **cut)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["parents", "depths"],
    meta_fields=["max_depth"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftTree:
    """The parent and the depth of each node of every row's tree.

    Node 0 is the root, the newest committed token; draft token j is node j + 1.
    A parent comes before its children, and siblings come in the order in which they
    were drawn.

        parents = [-1, 0, 0, 1, 2, 2]      0         depths = [0, 1, 1, 2, 2, 2]
                                          / \\
                                         1   2
                                         |   |\\
                                         3   4 5

    Entries past a row's last node are meaningless.
    """

    parents: Array  # i32[rows, num_nodes], NO_PARENT at the root
    depths: Array  # i32[rows, num_nodes], edges to the root
    max_depth: int  # static; no depth exceeds it

    @property
    def num_nodes(self) -> int:
        return self.parents.shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Proposal:
    """Draft tokens of every row: trees if `tree` is set, else chains.

    Without a tree, draft token j follows draft token j - 1, and num_drafts is K. A row's
    entries at and past its num_tokens may hold anything: ids outside the vocabulary, NaN.
    """

    # i32[rows, num_drafts]; draft token j is node j + 1. NOT_A_TOKEN for NaN logits.
    token_ids: Array
    num_tokens: Array  # i32[rows], in [0, num_drafts]: how many of them are valid
    # f32[rows, num_drafts, vocab]; entry j is the distribution that the children of node
    # j were drawn from, without replacement. None: a deterministic proposal.
    probs: Array | None = None
    tree: DraftTree | None = None
    # f32[rows, num_drafts] each, estimated acceptance probability of draft token j and the
    # path to it; None: unknown. The first depends only on tokens drawn before j, so rules
    # that compare distributions may select drafts for verification by it. The second depends
    # on token j itself, and is only for `greedy`, `seeded` and `delta`.
    prior_confidence: Array | None = None
    path_probability: Array | None = None

    @property
    def num_nodes(self) -> int:
        """Returns the most nodes of a row, including the root."""
        return self.token_ids.shape[1] + 1

    @property
    def max_depth(self) -> int:
        """Returns the most draft tokens on one path."""
        return self.token_ids.shape[1] if self.tree is None else self.tree.max_depth


class Acceptance(NamedTuple):
    """The result of a verification rule."""

    # i32[rows, max_depth + 1]: accepted draft tokens, then one token of the target's own
    token_ids: Array
    num_accepted: Array  # i32[rows], in [0, max_depth]
    # i32[rows, max_depth]: the accepted nodes in order; only the first num_accepted
    # are valid. None for chains, where they are 1, 2, ...
    nodes: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepInfo:
    """Report of a step to the host; a burst stacks those of its steps on a leading axis.

    The first num_committed[row] entries of the token axis were committed; the drafter
    proposed the first num_accepted[row] of them.
    """

    token_ids: Array  # i32[rows, K + 1]
    num_committed: Array  # i32[rows]
    num_accepted: Array  # i32[rows]
    num_drafted: Array  # i32[rows], nodes of a tree
    draft_depth: Array  # i32[rows], tokens on the longest path that was verified
    proposed_depth: Array  # i32[rows], the same before unlikely drafts were left out
    finish: Array  # i32[rows], RUNNING or why the row ended in this step
    drafter_lengths: Array  # i32[rows], tokens whose KV is final in the drafter's cache
    drafter_fault: Array  # i32[rows], NO_FAULT .. NOT_A_NUMBER
    logprobs: Any  # sampling.LogProbs with leading [rows, K + 1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BurstPlan:
    """The host's decisions for a burst, as dynamic values."""

    num_steps: HostArray  # i32[], most steps
    stop_when_finished: HostArray  # bool[], end early when a row ends because work waits
    activate: HostArray  # bool[rows], rows whose prompts are prefilled and that decode from now on
    keep: HostArray  # bool[rows], rows that hold a request; others are emptied
    block_table: HostArray  # i32[rows, pages_per_row], room for all that the burst may write
    draft_caps: HostArray  # i32[rows], most tokens that each row may draft
    # i32[row bucket], the rows that the burst runs, `rows` in unused places: fewer rows
    # cost less. None: all rows, in order. Under a mesh each shard has its share.
    row_ids: HostArray | None = None


class DecoderParams(NamedTuple):
    """Weights of target and drafter: an argument of every call, never donated."""

    target: Any
    drafter: Any = ()


def lay_out(counts: Array, num_tokens: int) -> tuple[Array, Array, Array]:
    """Lays counts i32[rows] tokens per row end to end.

    Returns:
      row_starts i32[rows + 1]; row_ids i32[num_tokens], `rows` in padding; and
      offsets i32[num_tokens], the index of each token within its row.
    """
    rows = counts.shape[0]
    row_starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts)])
    index = jnp.arange(num_tokens, dtype=jnp.int32)
    row_ids = rows_of(row_starts, num_tokens)
    offsets = index - row_starts[jnp.minimum(row_ids, rows)]
    return row_starts, row_ids, offsets
