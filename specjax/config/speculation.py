"""The configuration of speculation: the drafter, K, and the verification rule."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
import numbers
import operator
import os
import warnings
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, cast, get_args

from specjax.config import batch_size_table, vllm_json
from specjax.config.checks import check_store_features, is_int, is_sized
from specjax.config.keywords import holds_fields
from specjax.config.names import BY_NAME, MATCHING, Method
from specjax.config.rules import VERIFICATION_RULES, VerificationRule, unknown_rule

Policy: TypeAlias = Literal["goodput", "fixed"]
POLICIES = get_args(Policy)

# K where none is given: the one of a fixed K, and the largest that goodput may choose. A chain of 7
# and its root are 8 tokens, to which products of 5 to 7 are padded on many devices.
DEFAULT_NUM_SPECULATIVE_TOKENS, DEFAULT_MOST = 4, 7

MAX_DRAFT_NODES = 255

MAX_DEPTH = 63
# The largest number that each of these fields may have; the least is 1, or None.
_MOST = {
    "max_drafts_per_step": math.inf,
    "speculation_max_rows": math.inf,
    "max_model_len": math.inf,
    "corpus_tokens": math.inf,
    "draft_tensor_parallel_size": math.inf,
    "num_draft_nodes": MAX_DRAFT_NODES,
}


def _check_lossy(config: SpeculationConfig) -> None:
    """Raises if a number of the lossy rules is invalid; makes the rates a tuple."""
    for name, low in (("lenience", 0), ("typical_epsilon", 0), ("typical_delta", 0)):
        value: Any = getattr(config, name)
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number or not low < cast(float, value) <= 1:
            raise ValueError(f"{name}={value!r} must be above {low} and at most 1.")
    rates = config.synthetic_acceptance_rates
    if rates is None:
        if config.verification == "synthetic":
            raise ValueError(
                "verification='synthetic' needs synthetic_acceptance_rates, one per "
                "depth, as in [0.8, 0.7, 0.6]."
            )
        return
    is_rate = lambda rate: isinstance(rate, numbers.Real) and 0 <= float(rate) <= 1
    if not is_sized(rates) or not len(rates) or not all(map(is_rate, rates)):
        raise ValueError(f"synthetic_acceptance_rates={rates!r} must list numbers from 0 to 1.")
    as_floats = tuple(map(float, rates))
    object.__setattr__(config, "synthetic_acceptance_rates", as_floats)


def _rank_paths(tree: Any) -> tuple[tuple[int, ...], ...] | None:
    """Returns a tree's nodes as paths of ranks, from any of the forms that users write."""
    if tree is None:
        return None
    given = tree
    try:
        if isinstance(given, str):
            given = ast.literal_eval(given)
        if all(is_int(width) and width >= 1 for width in given):
            # One node above the limit is enough for the error below.
            ranks = [range(min(width, MAX_DRAFT_NODES + 1)) for width in given]
            paths = [
                path
                for depth in range(1, len(ranks) + 1)
                for path in itertools.islice(itertools.product(*ranks[:depth]), MAX_DRAFT_NODES + 1)
            ]
        else:
            paths = [tuple(map(operator.index, path)) for path in given]
            paths = [path for path in paths if path]
    except (TypeError, ValueError, SyntaxError):
        paths = []
    if paths and max(map(len, paths)) > MAX_DEPTH:
        raise ValueError(
            f"speculative_token_tree is {max(map(len, paths))} deep; at most {MAX_DEPTH} is "
            f"allowed."
        )
    if not paths or any(min(path) < 0 for path in paths):
        raise ValueError(
            f"speculative_token_tree={tree!r} must list nodes, as '[(0,), (1,), (0, 0)]', "
            "or children per depth, as (2, 1)."
        )
    if len(paths) > MAX_DRAFT_NODES:
        raise ValueError(
            f"speculative_token_tree={tree!r} has more than {MAX_DRAFT_NODES} nodes; list fewer."
        )
    return tuple(paths)


@holds_fields("speculative_config")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """The configuration of speculation: the drafter, K, and the verification rule.

    Fields are the keys of vLLM's `--speculative-config`. A drafter that is passed beside this
    needs neither `method` nor `model`.
    """

    # None, "ngram", "history", "self-int8", "self-int4", "draft_model", or a kind of head
    method: Method | None = None
    model: str | None = None  # a folder, a hub name, or "demo"
    # Most draft tokens along one path, as the user gives it; `depth` resolves the default.
    num_speculative_tokens: int | None = None
    # K by the number of rows that decode: [[first, last, K], ...], see batch_size_table.
    num_speculative_tokens_per_batch_size: Any = None  # tuple[Entry, ...], once made
    # "goodput": the K with the most expected tokens per second, up to num_speculative_tokens;
    # "fixed": always that K. By default the table above if there is one, else goodput.
    policy: Policy | None = None
    # Most decoding rows with which a batch drafts; by default unlimited.
    speculation_max_rows: int | None = None
    # Most positions fed to a draft model; by default its own limit.
    max_model_len: int | None = None
    verification: VerificationRule = "seeded"
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    prompt_lookup_matches: int = 1  # continuations; more than one are drafted as a tree
    # Most tokens of such a tree, or of one grown with tree_top_k. By default all of them, or
    # tree_top_k per depth.
    num_draft_nodes: int | None = None
    # Tokens of the text that rows share: earlier answers, to their own prompts and to others.
    # Method "history" drafts from it, by default drafters.spec.CORPUS_TOKENS. A draft model
    # drafts only where no better match is found in it, by default without such text.
    corpus_tokens: int | None = None
    # Static tree of a draft model, each node as the ranks on the path to it:
    # "[(0,), (1,), (0, 0)]", the same as a list, or the children per depth, (2, 1). By default
    # chains are drafted.
    speculative_token_tree: Any = None  # tuple[tuple[int, ...], ...], once made
    # Dynamic tree of a draft model (EAGLE-2's top-k): the number of most probable nodes
    # expanded per depth, and of children considered for each.
    tree_top_k: int | None = None
    # Whether a draft model drafts all tokens of a step in one forward, over mask tokens (PARD). By
    # default it does if its config.json names a mask token.
    parallel_drafting: bool | None = None
    # Whether an EAGLE or DFlash head stores one vector per token, which its layers read. It then
    # only stores while K is 0, and runs its layers over these tokens when a row drafts: plain steps
    # take less time, and tokens more memory. "captured" stores the target's hidden states from
    # which that vector is computed: plain steps compute nothing, and tokens take the most memory.
    # By default heads of several EAGLE layers store the vector.
    store_features: bool | Literal["captured"] | None = None
    # Devices of a mesh's tensor axis over which a draft model is split, a number that divides the
    # axis: 1 puts the whole drafter on each device. By default the number with the shortest time
    # per draft token by the devices' published figures, 1 where these are unknown.
    draft_tensor_parallel_size: int | None = None
    # Most draft tokens verified per step over all rows, the likeliest to be accepted; by default
    # all drafted ones.
    max_drafts_per_step: int | None = None
    lenience: float = 0.5  # "lenient": factor on draft probabilities
    typical_epsilon: float = 0.09  # "typical": thresholds
    typical_delta: float = 0.3
    # "synthetic": acceptance rate at each depth; the last one applies to all deeper ones.
    synthetic_acceptance_rates: Any = None  # tuple[float, ...], once made

    def __post_init__(self):
        tree = _rank_paths(self.speculative_token_tree)
        object.__setattr__(self, "speculative_token_tree", tree)
        self._set_table()
        self._check_names()
        self._check_depth()
        self._check_growth()
        if not isinstance(self.parallel_drafting, bool | None):
            raise ValueError(
                f"parallel_drafting={self.parallel_drafting!r} must be True, False or None."
            )
        check_store_features(self.store_features)
        self._check_numbers()
        if self.verification not in VERIFICATION_RULES:
            raise ValueError(unknown_rule(self.verification))
        _check_lossy(self)

    def _check_names(self) -> None:
        """Raises ValueError for a method, policy or model that is none."""
        vllm_json.check_method(self.method)
        if self.policy not in (None, *POLICIES):
            raise ValueError(
                f"policy={self.policy!r} is unknown; expected one of "
                f"{', '.join(map(repr, POLICIES))}, "
                "or None."
            )
        if self.policy is not None and self.num_speculative_tokens_per_batch_size:
            raise ValueError(
                f"policy={self.policy!r} and num_speculative_tokens_per_batch_size both say "
                "which K; leave one of them out."
            )
        is_name = isinstance(self.model, str | os.PathLike) and self.model != ""
        if self.model is not None and not is_name:
            raise ValueError(f"model={self.model!r} must name a folder or a model.")
        # Method "mtp" is in the target's own folder, unless a model is named.
        if self.method not in (None, "mtp", *BY_NAME) and self.model is None:
            demo = ', or "demo"' if self.method == "draft_model" else ""
            raise ValueError(
                f"method {self.method!r} without a 'model': name a folder{demo}, or leave 'method' "
                "out where a drafter is given beside it."
            )

    def _check_depth(self) -> None:
        """Raises ValueError for a K that cannot be, or a tree that does not go with it."""
        if not is_int(self.depth) or not 0 <= self.depth <= MAX_DEPTH:
            raise ValueError(
                f"num_speculative_tokens={self.num_speculative_tokens!r} must be a whole number "
                f"from 0 (no speculation) to {MAX_DEPTH}."
            )
        if (tree := self.speculative_token_tree) is None:
            return
        if self.depth > max(map(len, tree)):
            raise ValueError(
                f"num_speculative_tokens={self.num_speculative_tokens!r} is deeper than "
                f"speculative_token_tree, {max(map(len, tree))}; leave it out or lower it."
            )
        if self.method in MATCHING:
            raise ValueError(
                "speculative_token_tree is the shape of a draft model's tree; with "
                f"method {self.method!r} leave it out."
            )

    def _check_numbers(self) -> None:
        """Raises ValueError for a number outside its range."""
        for name, most in _MOST.items():
            number = getattr(self, name)
            if number is not None and not (is_int(number) and 1 <= number <= most):
                to = "of at least 1" if most == math.inf else f"from 1 to {most}"
                raise ValueError(f"{name}={number!r} must be a whole number {to}, or None.")
        matches = self.prompt_lookup_matches
        if not (is_int(matches) and 1 <= matches <= 16):
            raise ValueError(
                f"prompt_lookup_matches={matches!r} must be a whole number from 1 to 16."
            )
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if not (is_int(low) and is_int(high) and 1 <= low <= high <= 16):
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min!r} and "
                f"prompt_lookup_max={self.prompt_lookup_max!r} must satisfy 1 <= min <= max <= 16."
            )

    @property
    def depth(self) -> int:
        """Most draft tokens along one path: num_speculative_tokens, else the table's largest K, a
        tree's depth, or the default."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        table = self.num_speculative_tokens_per_batch_size
        if table is not None and self.speculative_token_tree is None:
            return batch_size_table.most(table)
        tree = self.speculative_token_tree
        if tree is not None:
            return max(map(len, tree))
        is_chain = self.tree_top_k is None and self.prompt_lookup_matches == 1
        is_exact = self.verification in ("greedy", "seeded", "delta")
        finds_k = is_chain and is_exact and self.policy != "fixed"
        return DEFAULT_MOST if finds_k else DEFAULT_NUM_SPECULATIVE_TOKENS

    @property
    def has_tree(self) -> bool:
        """Whether it sets the tree of a draft model."""
        return self.speculative_token_tree is not None or self.tree_top_k is not None

    def _set_table(self) -> None:
        """Parses num_speculative_tokens_per_batch_size; lowers K above the limit with a warning."""
        if self.num_speculative_tokens_per_batch_size is None:
            return
        table = batch_size_table.parse(self.num_speculative_tokens_per_batch_size)
        most = self.num_speculative_tokens
        if is_int(most) and batch_size_table.most(table) > most:
            warnings.warn(
                f"{batch_size_table.NAME} asks for K = {batch_size_table.most(table)}, and "
                f"num_speculative_tokens={most} is the most; raise it, or no more is drafted.",
                stacklevel=5,
            )
            table = batch_size_table.at_most(table, most)
        object.__setattr__(self, batch_size_table.NAME, table)

    def _check_growth(self) -> None:
        """Raises if tree_top_k is invalid or contradicts other fields."""
        top_k, depth = self.tree_top_k, self.depth
        if top_k is None:
            return
        if not is_int(top_k) or not 1 <= top_k <= 32:
            raise ValueError(f"tree_top_k={top_k!r} must be a whole number from 1 to 32.")
        if self.speculative_token_tree is not None or self.method in MATCHING:
            raise ValueError(
                "tree_top_k grows a draft model's tree; leave it out together with "
                "speculative_token_tree or method 'ngram' or 'history'."
            )
        if depth == 0 or (depth - 1) * top_k > MAX_DRAFT_NODES:
            raise ValueError(
                f"tree_top_k={top_k!r} and num_speculative_tokens={depth!r} grow a tree of "
                f"{max(depth - 1, 0) * top_k} nodes; expected a depth of at least 1 and at "
                f"most {MAX_DRAFT_NODES} nodes. Lower either."
            )

    @classmethod
    def from_json(cls, text_or_mapping: str | Mapping[str, Any]) -> SpeculationConfig:
        """Returns the config of vLLM's `--speculative-config`, as JSON text or a mapping.

        One warning names vLLM's keys that have no effect here, and why; another names unknown
        keys that resemble no known one. docs/speculative-config.md lists all keys.

        Raises:
          ValueError: not a JSON object, a method that specjax does not have, a key that is
            misspelt, or keys that contradict.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        reading = vllm_json.read(text_or_mapping, defaults)
        for warning in reading.warnings:
            warnings.warn(warning, stacklevel=2)
        return cls(**reading.fields)
