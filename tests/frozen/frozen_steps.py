"""The lowered text of steps: what the device is asked to compute.

Locations, and names that jax takes from Python, are left out: a file or a function may be moved or
renamed. The order and the shapes of arguments are part of the text.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers import first_layer, tiny_gpt2, tiny_llama
from jax.sharding import Mesh

import specjax
from specjax.config.engine import EngineConfig
from specjax.config.rules import Rule
from specjax.decode.config import DecoderConfig
from specjax.decode.kept import KeptShape
from specjax.decode.rules import RuleOptions
from specjax.decode.sizes import Sizes
from specjax.planning.abstract_decoder import AbstractDecoder

K, ROWS, PAGE, PAGES_PER_ROW = 3, 4, 8, 8
PROMPT_TOKENS = 16
TARGETS = {
    "llama": lambda: tiny_llama(0),
    "qwen3": lambda: tiny_llama(0, family="qwen3", qk_norm=True),
    "gpt2": lambda: tiny_gpt2(0, qkv_bias=True, o_bias=True, mlp_bias=True),
}
TREE = {"speculative_token_tree": (2, 1, 1)}
GROWN = {"tree_top_k": 2, "num_speculative_tokens": K}
INVARIANT = {"numerics": "invariant", "token_bucket": 8}
RULES = [rule for rule in Rule if rule > Rule.DELTA]  # beyond equality
TREE_RULES = [rule for rule in RULES if rule != Rule.BLOCK]  # which is for chains
HEADS = (
    "EAGLE-3",
    "P-EAGLE",
    "EAGLE",
    "MTP",
    "DFlash",
    "DFlash2",
    "DSpark",
    "Medusa",
    "MLP speculator",
)


@dataclasses.dataclass(frozen=True)
class Pair:
    """A target and a drafter for it, with options of the steps.

    Attributes:
      drafter: as `load_drafter` takes it.
      config: of the speculation.
      engine: fields of EngineConfig.
      decoder: fields of the decoder's config.
    """

    target: specjax.Model
    drafter: Any = None
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    decoder: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: Any = jnp.float32


def tiny(family: str, **options: Any) -> Pair:
    """Returns a tiny target and its first layer as a draft model."""
    target = TARGETS[family]()
    return Pair(target, first_layer(target), **options)


def matching(name: str, **config: Any) -> Pair:
    return Pair(TARGETS["llama"](), name, config)


def published_heads() -> dict[str, Any]:
    """Returns heads of every published kind and flag, which tests of their writers have."""
    sys.path.append(str(Path(__file__).parents[1] / "specjax" / "heads"))
    from written_heads import CASES

    return CASES


def head(kind: str, which: str = "plain", **options: Any) -> Pair:
    """Returns a published kind of head over its target."""
    case = published_heads()[f"{kind}, {which}"]
    return Pair(case.target, case.load(), **options)


def mesh() -> dict[str, Any]:
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    return {"mesh": Mesh(devices, ("data", "tensor"))}


# The steps of a pair. This is all that knows how the library lowers them.


class _Lowered(AbstractDecoder):
    def _compile(self, kind: str, lowered: Any) -> Any:
        return lowered


def _decoder(pair: Pair) -> _Lowered:
    config = specjax.SpeculationConfig(**{"num_speculative_tokens": K} | pair.config)
    spec = specjax.load_drafter(pair.drafter, pair.target, config).spec
    sizes = Sizes(
        rows=ROWS,
        page_size=PAGE,
        num_pages=ROWS * PAGES_PER_ROW,
        pages_per_row=PAGES_PER_ROW,
        burst_steps=4,
        tree_slots=spec.tree_slots(K),
        dtype=jnp.dtype(pair.dtype),
    )
    engine = EngineConfig(**pair.engine)
    return _Lowered(
        DecoderConfig(
            target=pair.target.config, drafter=spec, sizes=sizes, engine=engine, **pair.decoder
        )
    )


def burst(pair: Pair, k: int = K, rows: int | None = None) -> Any:
    return _decoder(pair).compile_burst(k, rows)


def plain(pair: Pair) -> Any:
    return burst(pair, 0)


def prefill(pair: Pair) -> Any:
    return _decoder(pair).compile_prefill(ROWS, PROMPT_TOKENS)


def mixed(pair: Pair) -> Any:
    return _decoder(pair).compile_mixed(ROWS, PROMPT_TOKENS, K)


def score(pair: Pair) -> Any:
    decoder = _decoder(pair)
    state = decoder.abstract_state
    text = jax.ShapeDtypeStruct((ROWS, PAGE), jnp.int32)
    counts = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    params = decoder.abstract_params
    return decoder.lower(
        decoder.score_step(params, ROWS), state, params, text, counts, state.sampling
    )


Step = Callable[[], Any]


def _of_family(family: str) -> dict[str, Step]:
    return {
        f"{family}, plain": lambda: plain(Pair(TARGETS[family]())),
        f"{family}, prompts": lambda: prefill(tiny(family)),
        f"{family}, chain": lambda: burst(tiny(family)),
        f"{family}, tree": lambda: burst(tiny(family, config=TREE)),
        f"{family}, grown tree": lambda: burst(tiny(family, config=GROWN)),
        f"{family}, mixed with prompts": lambda: mixed(tiny(family)),
    }


def _of_head(kind: str) -> dict[str, Step]:
    return {f"{kind} head": lambda: burst(head(kind))}


def _with(**options: Any) -> Pair:
    return tiny("llama", **options)


def _rules(rules: list[Rule]) -> dict[str, Any]:
    options = RuleOptions(lenience=0.5, synthetic_rates=(0.9, 0.6))
    return {"rules": tuple(rules), "rule_options": options}


STEPS: dict[str, Step] = {
    **_of_family("llama"),
    **_of_family("qwen3"),
    **_of_family("gpt2"),
    "n-gram": lambda: burst(matching("ngram")),
    "n-gram, tree": lambda: burst(matching("ngram", prompt_lookup_matches=3)),
    "history": lambda: burst(matching("history")),
    "self-int8": lambda: burst(matching("self-int8")),
    "draft model beside history": lambda: burst(_with(config={"corpus_tokens": 128})),
    "all rules, chain": lambda: burst(_with(decoder=_rules(RULES))),
    "all rules, tree": lambda: burst(_with(config=TREE, decoder=_rules(TREE_RULES))),
    "invariant": lambda: burst(_with(engine=INVARIANT)),
    "invariant, tree": lambda: burst(_with(config=TREE, engine=INVARIANT)),
    "invariant, prompts": lambda: prefill(_with(engine=INVARIANT)),
    "two rows of four": lambda: burst(_with(), rows=2),
    "ranked drafts": lambda: burst(_with(decoder={"max_drafts_per_shard": 5})),
    "int8 pages": lambda: burst(_with(engine={"kv_cache_dtype": "int8"})),
    "bfloat16": lambda: burst(_with(dtype=jnp.bfloat16)),
    "scores": lambda: score(_with()),
    **{name: step for kind in HEADS for name, step in _of_head(kind).items()},
    "EAGLE-3 head, plain": lambda: plain(head("EAGLE-3")),
    "EAGLE-3 head, prompts": lambda: prefill(head("EAGLE-3")),
    "EAGLE-3 head, tree": lambda: burst(head("EAGLE-3", config=TREE)),
    "EAGLE-3 head of two layers, plain": lambda: plain(head("EAGLE-3", "two layers")),
    "EAGLE-3 head that learns": lambda: burst(head("EAGLE-3", decoder={"kept": KeptShape(4, 16)})),
    "Medusa head, tree": lambda: burst(head("Medusa", config=TREE)),
    "mesh 2x2, plain": lambda: plain(_with(decoder=mesh())),
    "mesh 2x2, all rules": lambda: burst(_with(decoder=mesh() | _rules(RULES))),
    "mesh 2x2, mixed with prompts": lambda: mixed(_with(decoder=mesh())),
    "mesh 2x2, EAGLE-3 head": lambda: burst(head("EAGLE-3", decoder=mesh())),
}
_DEFINED = re.compile(r"func\.func (?:public |private )?@([\w.$-]+)")
_RESULT = re.compile(r'jax\.result_info = "[^"]*"(, )?')


def text_of(step: Step) -> str:
    """Returns the lowered text of a step with functions numbered in place of named."""
    text = _RESULT.sub("", step().as_text())
    numbers = {name: f"f{i}" for i, name in enumerate(_DEFINED.findall(text))}
    text = re.sub(r"@([\w.$-]+)", lambda hit: f"@{numbers.get(hit[1], hit[1])}", text)
    return re.sub(r"^module @\S+", "module @step", text, flags=re.MULTILINE)


def contents() -> dict[str, str]:
    return {name: text_of(step) for name, step in STEPS.items()}
