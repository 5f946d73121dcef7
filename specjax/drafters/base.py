"""The drafter contract: a hashable `DrafterSpec` builds a `Drafter`, a group of pure functions.

A drafter proposes tokens. It changes the speed and not the output, except that under rules that
compare distributions `Proposal.probs` must be true: `specjax.testing.check_drafter` tests it. Its
functions run inside the jitted burst, over a state of its own, which may be any pytree. A drafter
whose function raises or returns something else, or that proposes NaN or ids outside the
vocabulary, is turned off for the run, and decoding continues without it.
docs/your-own-drafter.md has an example.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from specjax.config.checks import is_int
from specjax.config.speculation import SpeculationConfig
from specjax.models.abstract import abstract_weights
from specjax.models.base import MeshAxes, ModelConfig
from specjax.models.base import resolve_taps as resolve_taps
from specjax.models.families import family_of
from specjax.paged import forward, kv_cache
from specjax.paged.work import Block as Block
from specjax.paged.work import ModelWork as ModelWork
from specjax.paged.work import model_work
from specjax.sampling.vocabulary import Vocabulary
from specjax.types import DecoderParams, Proposal, TokenBatch

if TYPE_CHECKING:
    from specjax.drafters.history import Pieces

NOT_KEPT = -1
CATCH_UP_WIDTH = 16  # tokens of each row per forward, where a model catches up with committed ones
LEAST_CATCH_UP, MOST_CATCH_UP = 64, 512  # of all rows, where these share them in any proportion

# Fields of a SpeculationConfig that say how a drafter drafts; see DrafterSpec.configured.
DRAFTER_FIELDS = (
    "max_model_len",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "prompt_lookup_matches",
    "num_draft_nodes",
    "corpus_tokens",
    "speculative_token_tree",
    "tree_top_k",
)

# Axes of a leaf of the state. They are names of specjax.models.sharding.RULES, not of a mesh.
ROWS = PartitionSpec("rows")  # entry r of the first axis belongs to row r
PAGES = PartitionSpec("pages")  # entry p of the first axis belongs to page p
SHARED = PartitionSpec()  # belongs to all rows; every shard of a mesh holds the whole leaf


class Draft(NamedTuple):
    """The result of `Drafter.draft`: a proposal and the drafter's new state."""

    proposal: Proposal
    state: Any
    # i32[rows]: the drafter's pages hold keys and values of all positions below this one, valid
    # as far as the draft tokens among them are accepted. None: the drafter keeps no keys and
    # values, and has nothing to catch up with.
    written: Array | None = None
    # For trees, i32[rows, num_nodes]: the keys and values of node j are in the slot of
    # position root + kept_at[row, j]; NOT_KEPT if the node was not fed. `written` then
    # counts up to and with the root.
    kept_at: Array | None = None
    # i32[rows], types.NO_FAULT or a fault after it; set by the step, not by the drafter.
    fault: Array | None = None
    # `decode_state.cache.pages` with keys and values written to the slots of nodes, the root's
    # first; only of a spec that says `uses_target_pages`.
    pages: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterContext:
    """Static arguments of `DrafterSpec.build`; a step is compiled for each combination.

    Attributes:
      target: config of the target, whose vocabulary draft tokens are from.
      num_speculative_tokens: K, at least 1, the most tokens along one path of a proposal. Only
        `draft` may depend on it: a drafter is built for each K in use, and its state, which
        a build for K = 1 makes and feeds with prompts, serves them all.
      dtype: of the target's weights and hidden states, and of the pages of a drafter that keeps
        keys and values; EngineConfig.kv_cache_dtype is for the target's pages alone.
      tensor_axis: the mesh axes that the target's heads and vocabulary are split over, None
        where each device holds the whole target. `DecoderParams.target` is one device's part.
      draft_axis: the mesh axes that the drafter's own heads are split over, None where each
        device holds the whole drafter. With `DrafterSpec.num_shards` above 1,
        `DecoderParams.drafter` is one device's part.
      copies_axis: the mesh axis along which devices hold the same part of a drafter that is
        split over part of the tensor axis; None without such a split.
      keeps_probs: whether a rule in use compares distributions. Proposals of a spec with
        `has_probs` then set `Proposal.probs`.
      says_confidence: whether drafts are ranked over all rows. Proposals of a spec with
        `has_probs` then set `Proposal.prior_confidence` and `path_probability`.
      taps: the spec's taps as layers of this target, counted from 0.
    """

    target: ModelConfig
    num_speculative_tokens: int
    dtype: Any
    tensor_axis: MeshAxes | None = None
    draft_axis: MeshAxes | None = None
    copies_axis: str | None = None
    keeps_probs: bool = False
    says_confidence: bool = False
    taps: tuple[int, ...] = ()

    def target_logits(self, params: DecoderParams, hidden: Array) -> Array:
        """Returns the logits that the target's head gives for hidden states.

        It is the whole head, as the target's own forward ends with it: a tied or an untied
        matrix, the divisor and the softcap, over all shards of the vocabulary.

        Args:
          hidden: [..., hidden_size], as the last tap has it, after the final norm. It is cast to
            `dtype`.

        Returns:
          f32[..., vocab].
        """
        flat = hidden.reshape(-1, hidden.shape[-1]).astype(self.dtype)
        scores = forward.logits(params.target, self.target, flat, self.tensor_axis)
        return scores.reshape(*hidden.shape[:-1], scores.shape[-1])

    def own_target_logits(self, params: DecoderParams, hidden: Array) -> tuple[Array, Vocabulary]:
        """Returns this device's slice of `target_logits`, f32[n, width], and how they are split.

        Drawing over slices (`choose_tokens`) takes a few numbers per token from other devices.

        Args:
          hidden: [n, hidden_size], as of `target_logits`.
        """
        hidden = hidden.astype(self.dtype)
        return forward.own_logits(params.target, self.target, hidden, self.tensor_axis)

    def target_embedding(self, params: DecoderParams, token_ids: Array) -> Array:
        """Returns the target's embeddings of tokens, with its embedding multiplier.

        Embeddings of positions, as GPT-2 adds them, are left out.

        Args:
          token_ids: i32[...], any shape.

        Returns:
          dtype[..., hidden_size].
        """
        embed = family_of(self.target).embed
        return embed(params.target, self.target, token_ids, self.tensor_axis)


class WeightMaker(Protocol):
    """Makes a drafter's weights from the target's; hashable."""

    def __call__(self, target: ModelConfig, params: Any, /) -> Any:
        """Returns the drafter's weights; traced."""
        ...


class DrafterSpec:
    """Describes a drafter as a hashable value, which is part of the key of a compiled step.

    To add a drafter, derive a frozen dataclass from this class and define `build`; specs with
    equal fields then share their executables. Every other member has a default, which is
    right for a drafter of chains that runs no model and gives no probabilities.

    Attributes:
      can_draft: False means plain decoding: no step asks for drafts.
      has_probs: whether proposals set the distribution that their tokens were drawn from, where
        the context asks for it (`keeps_probs`), and confidences (`says_confidence`).
      takes_text: whether the engine passes the text of rows to `Drafter.remember`.
      abstains: whether it may propose nothing for a row that is asked. Steps then are as wide as
        what was proposed, at a few widths, each of which is compiled.
      learns: whether the drafts of a row may depend on more than its tokens, sampling
        parameters and seed: on the text of other rows, or on acceptance of earlier drafts.
      num_shards: devices of the tensor axis that share its weights and pages; 1: each device
        holds the whole drafter. See `split`.
      is_grown: whether a tree keeps nodes because of the tokens that were drawn there. Rules
        that compare distributions would be biased on it and are refused.
    """

    can_draft: ClassVar[bool] = True
    has_probs: ClassVar[bool] = False
    abstains: ClassVar[bool] = True
    takes_text: ClassVar[bool] = False
    learns: ClassVar[bool] = False

    def build(self, context: DrafterContext) -> Drafter:
        """Returns the functions of this drafter for a context. Any exception turns it off."""
        raise NotImplementedError(f"{type(self).__name__} has no build(context).")

    @property
    def num_shards(self) -> int:
        return 1

    def can_split(self, num_shards: int) -> bool:
        """Returns whether `split` takes so many shards; the default takes 1."""
        return num_shards == 1

    def split(self, num_shards: int) -> DrafterSpec:
        """Returns the spec with its weights split over num_shards devices, its num_shards.

        The weights are then those of the first of `configs`, split by the axes of its family,
        and `build` finds the axes in `DrafterContext.draft_axis`.
        """
        del num_shards
        return self

    @property
    def made_by(self) -> WeightMaker | None:
        """What makes its weights from the target's, once per version; None: they are its own.

        Its `LoadedDrafter.params` are then (), and its weights are split as the target's are: they
        are matrices of the target, by their names, or arrays beside them.
        """
        return None

    @property
    def uses_target_pages(self) -> bool:
        """Whether it drafts over the target's keys and values, and sets Draft.pages.

        It may write to the slots of its nodes alone, which the target overwrites when it verifies
        them: past a row's `lengths`, the root's first.
        """
        return False

    @property
    def is_tree(self) -> bool:
        """Whether proposals are trees: Proposal.tree is set."""
        return False

    @property
    def is_grown(self) -> bool:
        return False

    @property
    def max_depth(self) -> int | None:
        """Depth of a tree of fixed depth, at least 1; None: the depth is K."""
        return None

    @property
    def most_drafts(self) -> int | None:
        """Most tokens of a chain that it drafts, whatever K is; None: as many as K."""
        return None

    @property
    def configs(self) -> tuple[ModelConfig, ...]:
        """Configs of the models it runs over the target's pages, for checks against the target."""
        return ()

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose hidden states it absorbs, for every token fed.

        Tap i is the input of layer i; tap num_layers is the normed output of the last, and
        tap num_layers + 1 the same before the final norm. Negative numbers count from the
        normed output: -1 is it. See Drafter.absorb.
        """
        return ()

    @property
    def likely_faults(self) -> tuple[str, ...]:
        """What is likely wrong where hardly a draft is accepted: clauses, the likeliest first."""
        return ("its weights are not those that its equations expect",)

    def num_nodes(self, num_speculative_tokens: int) -> int:
        """Returns the nodes verified per row, root included."""
        return 1 + num_speculative_tokens

    def tree_slots(self, num_speculative_tokens: int) -> int:
        """Returns the slots that a row takes past its root: for the nodes of a tree, those that
        are fed to grow it included, or for the masks of a block; 0 for chains that are drafted
        token by token."""
        del num_speculative_tokens
        return 0

    def configured(self, config: SpeculationConfig) -> DrafterSpec:
        """Returns the spec with a config's settings applied. A field at its default sets nothing.

        The default takes none of DRAFTER_FIELDS, and no parallel_drafting or store_features but
        False. A drafter that takes some applies them itself.

        Raises:
          ValueError: the config sets a field that does not apply to this drafter.
        """
        name = type(self).__name__
        if config.has_tree and self.can_draft:
            raise ValueError(no_tree_message(name))
        if self.can_draft:
            check_no_masks(config, repr(name))
        default = SpeculationConfig
        asked = [f for f in DRAFTER_FIELDS if getattr(config, f) != getattr(default, f)]
        if config.store_features:
            asked.append("store_features")
        if asked and self.can_draft:
            raise ValueError(
                f"the drafter is {name!r}, which takes none of {', '.join(asked)}; leave them out, "
                f"or apply them in {name}.configured(config)."
            )
        return self

    def bytes_per_token(self, target: ModelConfig, dtype: Any) -> int:
        """Returns the bytes of its pages on one device per token of a row, an int.

        The default counts keys and values of the models it runs, a part of num_shards of them.

        Args:
          dtype: of the pages, `DrafterContext.dtype`.
        """
        del target
        shards = self.num_shards
        numbers = (kv_cache.numbers_per_token(c, kv_shards=shards) // shards for c in self.configs)
        return sum(numbers) * jnp.dtype(dtype).itemsize

    def abstract_params(self, target: ModelConfig, dtype: Any) -> Any:
        """Returns its weights, `DecoderParams.drafter`, as a tree of jax.ShapeDtypeStruct.

        A spec that defines it is loaded with weights of these names and shapes alone, and plans
        without weights compile with it. The default is the weights of the first of `configs`;
        () where there is none.

        Args:
          dtype: of the weights.
        """
        del target
        return abstract_weights(self.configs[0], dtype) if self.configs else ()

    def work(
        self, target: ModelConfig, dtype: Any, num_weights: int | None = None
    ) -> tuple[ModelWork, ...]:
        """Returns the bytes and operations of one draft token per row on one device, or, with
        `ModelWork.block`, of a block that drafts all of them.

        Plans and the first choices of K add up the entries. The default counts one forward of
        each model it runs: a drafter without `configs` counts as free.

        Args:
          dtype: of its weights.
          num_weights: numbers in its weights, where that is known; counting them takes 0.1 s.
        """
        del target
        count = num_weights if len(self.configs) == 1 else None
        return tuple(model_work(config, dtype, self.num_shards, count) for config in self.configs)


def no_tree_message(name: str) -> str:
    """Returns the error message for tree settings on a drafter that is not a draft model."""
    return (
        "speculative_token_tree and tree_top_k are for a draft model's tree, and the drafter is "
        f"{name!r}; leave them out. Several n-gram matches make a tree with "
        "prompt_lookup_matches."
    )


def check_no_masks(config: SpeculationConfig, name: str) -> None:
    """Raises ValueError where a config asks for parallel drafts of a drafter without a mask token.

    Args:
      name: of the drafter, as a message has it.
    """
    if config.parallel_drafting:
        raise ValueError(
            "parallel_drafting=True is for a draft model whose config.json names a mask token "
            f"(pard_token), and {name} has none; leave it out."
        )


def check_num_shards(num_shards: Any) -> None:
    """Raises ValueError for a number of devices that is no whole number from 1."""
    if not (is_int(num_shards) and num_shards >= 1):
        raise ValueError(f"num_shards={num_shards!r:.100} must be a whole number from 1.")


def check_no_features(config: SpeculationConfig, name: str) -> None:
    """Raises ValueError where a config asks for stored features of a drafter that has none.

    Args:
      name: of the drafter, as a message has it.
    """
    if config.store_features:
        raise ValueError(
            f"store_features={config.store_features!r} is for heads of the EAGLE, MTP, DFlash and "
            f"DSpark kinds, and {name} is none; leave it out."
        )


def by_row(state: Any) -> Any:
    """Returns the axes of a state whose leaves all lead with rows."""
    return jax.tree.map(lambda leaf: ROWS, state)


def by_page(state: Any) -> Any:
    """Returns the axes of a state whose leaves all lead with pages."""
    return jax.tree.map(lambda leaf: PAGES, state)


def by_none(state: Any) -> Any:
    """Returns the axes of a state whose leaves are all shared by all rows."""
    return jax.tree.map(lambda leaf: SHARED, state)


def init_nothing(rows: int, max_length: int, num_pages: int, page_size: int) -> Any:
    del rows, max_length, num_pages, page_size
    return ()


def prefill_nothing(
    params: DecoderParams, state: Any, batch: TokenBatch, row_ids: Array, max_tokens_per_row: int
) -> Any:
    del params, batch, row_ids, max_tokens_per_row
    return state


def absorb_nothing(
    params: DecoderParams,
    state: Any,
    fed: TokenBatch,
    next_token_ids: Array,
    taps: tuple[Array, ...],
    row_ids: Array,
    max_tokens_per_row: int,
) -> Any:
    del params, fed, next_token_ids, taps, row_ids, max_tokens_per_row
    return state


def enter_nothing(state: Any, row_ids: Array, drafter_lengths: Array) -> Any:
    del row_ids, drafter_lengths
    return state


def move_nothing(state: Any, source_slots: Array, target_slots: Array) -> Any:
    del source_slots, target_slots
    return state


class Drafter(NamedTuple):
    """A group of pure functions over one state. Each is traced, and returns a state of the
    same structure, shapes and dtypes, which are the same for every K: see
    DrafterContext.num_speculative_tokens. Under a mesh each shard runs them on its own rows.

    `params` is always a `DecoderParams`: the target's weights and the drafter's. A head over the
    target reads its embedding and its head by `DrafterContext.target_embedding` and
    `target_logits`.

    Attributes:
      draft: (params, state, decode_state, num_tokens i32[rows]) -> Draft. Proposes at most
        num_tokens[row] tokens along a path after each row's root, the newest committed
        token; none where it is 0. A row that proposes fewer costs less. It may read these
        fields of `decode_state`, a specjax.decode.state.DecodeState: `history`
        i32[rows, max_length], the row's tokens by position; `cache.lengths` i32[rows], the
        root's position; `is_active` bool[rows]; `sampling` and `rules`, the row's request;
        `drafter_lengths` i32[rows], tokens whose keys and values the drafter has; and
        `cache.block_table` with `cache.page_size`, which locate these keys and values.
      init: (rows, max_length, num_pages, page_size) -> state. A row holds at most max_length
        tokens. Keys and values use the target's page ids, so that one allocation serves both.
      prefill: (params, state, batch, row_ids, max_tokens_per_row) -> state. Feeds prompt
        tokens, the same flat TokenBatch that the target gets. Its rows are places: place i
        is row row_ids[i]; the id is `rows` for an unused place.
      absorb: (params, state, fed, next_token_ids, taps, row_ids, max_tokens_per_row) -> state.
        See below; only for specs with `taps`.
      defer: as `absorb`, and called in its place for tokens of plain steps. It stores what
        absorbing takes, and `draft` absorbs it when the row drafts. None: `absorb` is called.
      enter_rows: (state, row_ids i32[n], drafter_lengths i32[n]) -> state. These rows hold
        another request from now on, or a preempted request again; row_ids are distinct,
        `rows` in unused places. Their pages already hold the keys and values of
        drafter_lengths tokens, in pages shared with other rows. The state must drop what it
        keeps about the previous request of the row.
      move: (state, source_slots i32[n], target_slots i32[n]) -> state. Moves keys and values
        of accepted nodes of a tree; `num_slots` moves nothing.
      remember: (state, pieces) -> state, between bursts. Takes in text from the host, see
        specjax.drafters.history. None unless the spec sets `takes_text`.
      state_axes: state -> a tree of the same structure, with the axes of each leaf: ROWS,
        PAGES, SHARED, or a longer PartitionSpec of logical names, as
        PartitionSpec("pages", "kv_heads"). With a row bucket, leaves with an axis "rows" are
        indexed by row. Over a mesh, rows and pages are split over the data axis, heads over
        the tensor axis. The default is ROWS for every leaf.
      max_positions: positions it was made for; nothing is drafted past them. None: no limit.
      draws_afresh: whether Proposal.probs are the distributions that its tokens were drawn
        from in this step, with the step's noise. Probabilities stored with the tokens of
        earlier rollouts are not: given the history, such tokens are certain.

    **absorb.** A drafter whose spec names `taps` gets every token that the target is fed
    (prompts, roots, accepted drafts, tokens of plain steps) with the target's hidden states
    there, in place of `prefill`:

        fed             TokenBatch: flat tokens of rows as for `prefill`; positions and pages
                        locate them
        next_token_ids  i32[num_tokens], the committed token after each of them. Store the pair
                        (hidden state of token j, token j + 1) in the slot of token j + 1:
                        then the content of a page depends on no token after it, and pages
                        can be shared by their tokens. Slot 0 of a row then holds what
                        the page's last owner left: mask it where slots are read, or write to it
        taps            one array [num_tokens, hidden_size] for each of the spec's taps
        row_ids         i32[n], as for `prefill`
        max_tokens_per_row  static

    It is called after commit where K > 0; every few steps at K = 0, with the tokens of all of
    them; for both parts of a mixed step; and chunk by chunk for prompts. So without `defer`, when
    `draft` is called, the drafter has absorbed every token before the root, with the root as the
    last next token: there is nothing to catch up with, `Draft.written` stays None, and the nodes
    that a tree fed need no `move`. A row whose root is its first token has absorbed nothing, and
    is not asked for drafts. Where a row shares pages with other rows, the last token of these
    pages is fed and absorbed again, unless the row is behind (see defer): its pair is the first in
    a page of the row's own.

    **defer.** Absorbing takes time that a row which does not draft has no use for. A drafter with
    `defer` is given the tokens of plain steps there. Then a row is behind: of its tokens before
    the root, the first `decode_state.drafter_lengths` are absorbed, and `draft` absorbs the
    others of the rows that it drafts for. It sets `Draft.written` to the root of these rows, and
    to their `drafter_lengths` of the others. What is stored must stay in the slots of the tokens
    in pages, `absorb` stores it too, and what a slot holds depends on no token after its own: a
    row may share pages whose tokens no row has absorbed. Of a row that is behind, `absorb` may
    read keys that nobody wrote: what it writes there is written again.
    """

    draft: Callable[[DecoderParams, Any, Any, Array], Draft]
    init: Callable[..., Any] = init_nothing
    prefill: Callable[..., Any] = prefill_nothing
    absorb: Callable[..., Any] = absorb_nothing
    defer: Callable[..., Any] | None = None
    enter_rows: Callable[[Any, Array, Array], Any] = enter_nothing
    move: Callable[[Any, Array, Array], Any] = move_nothing
    remember: Callable[[Any, Pieces], Any] | None = None
    state_axes: Callable[[Any], Any] = by_row
    max_positions: int | None = None
    draws_afresh: bool = False


def take_rows(drafter: Drafter, state: Any, row_ids: Array) -> Any:
    """Returns the drafter's state for some rows; leaves without a row axis are returned whole."""
    return jax.tree.map(
        lambda leaf, axes: _take(leaf, axes, row_ids), state, drafter.state_axes(state)
    )


def put_rows(drafter: Drafter, state: Any, row_ids: Array, part: Any) -> Any:
    """Returns the state with some rows, and all leaves without a row axis, taken from `part`.

    Args:
      row_ids: i32[n]; ids past the last row are dropped.
    """
    return jax.tree.map(
        lambda leaf, new, axes: _put(leaf, new, axes, row_ids),
        state,
        part,
        drafter.state_axes(state),
    )


def _row_axis(axes: PartitionSpec) -> int | None:
    return tuple(axes).index("rows") if "rows" in tuple(axes) else None


def _take(leaf: Array, axes: PartitionSpec, row_ids: Array) -> Array:
    axis = _row_axis(axes)
    return leaf if axis is None else leaf[(slice(None),) * axis + (row_ids,)]


def _put(leaf: Array, new: Array, axes: PartitionSpec, row_ids: Array) -> Array:
    axis = _row_axis(axes)
    if axis is None:
        return new
    return leaf.at[(slice(None),) * axis + (row_ids,)].set(new, mode="drop")
