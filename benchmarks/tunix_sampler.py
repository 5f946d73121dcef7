"""specjax beside tunix's own sampler, in one run on the same weights.

    python -m benchmarks.tunix_sampler [--json]

needs the `tunix` extra. Both are called as tunix's trainer calls them: texts in, token ids and
texts out, prompts fed anew. Contenders take turns, each round with prompts of its own, and
figures are ratios within this run. Greedy; every token of every round is compared.

Two sets of weights of one Qwen3 shape (60M parameters):

    random   what plain decoding is measured on. Its text does not repeat.
    copying  what drafts are measured on: the head holds the embedding, its rows moved by a
             permutation whose cycles have PERIOD words, and what layers add is small. So
             every word has a certain successor, prompts walk around a cycle, and the text is
             that cycle again and again: the best case of looking up what was written before.
             All matrices are dense, and cost what any others of their shape cost.

tunix's sampler attends to all of its cache, full or not, so its speed depends on the size
of its cache. Three are compared with: what its GRPO command chooses, which is given to specjax
too; the least that the calls need; and the default of its RolloutConfig.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.cli.bench import measuring
from specjax.config.engine import EngineConfig
from specjax.runtime import compilation_cache

try:
    from tunix.generate import sampler  # pyright: ignore[reportMissingImports]
    from tunix.models.qwen3 import model as qwen3  # pyright: ignore[reportMissingImports]
    from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(
        "benchmarks.tunix_sampler needs google-tunix: pip install google-tunix."
    ) from error

from specjax.integrations.tunix import SpecjaxRollout

PERIOD = 16  # words of a cycle
STD = 0.05  # of random matrices; far less, and rounding decides which word is likeliest
SMALL = 0.02  # what layers add to a copying model is scaled by
DRAFTERS = ("ngram", "history")
NUM_SPECULATIVE_TOKENS = 7
WARM_CALLS, STEADY_CALLS = 20, 4  # at most, and without a trace until they are enough
PAD, EOS = 0, 1
SPARE_TOKENS = 256  # tunix/cli/grpo_main.py adds them to the longest prompt and answer


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the model and of the calls."""

    num_layers: int = 8
    vocab_size: int = 32000
    embed_dim: int = 512
    hidden_dim: int = 1536
    num_heads: int = 8
    head_dim: int = 64
    num_kv_heads: int = 4
    prompt_tokens: int = 64
    new_tokens: int = 128
    batches: tuple[int, ...] = (1, 8)

    @property
    def kv_cache_size(self) -> int:
        """Tokens per row as tunix's GRPO command chooses them."""
        return self.prompt_tokens + self.new_tokens + SPARE_TOKENS

    @property
    def cache_tokens(self) -> dict[str, int]:
        """Tokens per row of tunix's contenders, by name."""
        return {
            "tunix, its command's cache": self.kv_cache_size,
            "tunix, least cache": self.prompt_tokens + self.new_tokens,
            "tunix, default cache": base_rollout.RolloutConfig.kv_cache_size,
        }

    @property
    def config(self) -> qwen3.ModelConfig:
        calls = ("prompt_tokens", "new_tokens", "batches")
        fields = {k: v for k, v in dataclasses.asdict(self).items() if k not in calls}
        return qwen3.ModelConfig(**fields, rope_theta=1_000_000, norm_eps=1e-6)


class Numbers:
    """A tokenizer of texts that are numbers: "17 4 9"."""

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int], **kwargs: Any) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 0  # none

    def eos_id(self) -> int:
        return EOS

    def pad_id(self) -> int:
        return PAD


class Weights:
    """A model, and the prompts of each round."""

    def __init__(self, shape: Shape, is_copying: bool):
        self.shape, self._is_copying = shape, is_copying
        self.model = qwen3.Qwen3(shape.config, rngs=nnx.Rngs(0))
        rng = np.random.default_rng(0)
        words = rng.permutation(np.arange(EOS + 1, shape.vocab_size))
        whole = len(words) // PERIOD * PERIOD
        self._cycles = words[:whole].reshape(-1, PERIOD)
        arrays = {}
        for path, variable in nnx.to_flat_state(nnx.state(self.model, nnx.Param)):
            std = STD
            if is_copying and path[-2] in ("o_proj", "down_proj"):
                std *= SMALL
            value = std * rng.standard_normal(variable.shape, np.float32)
            if len(variable.shape) == 1:
                value = 1 + value
            arrays[path[0] if path[0] != "layers" else path] = variable, value
        head = arrays["lm_head"][1]
        if is_copying:
            embedding = arrays["embedder"][1]
            after = np.roll(self._cycles, -1, axis=1)
            head[:, after.reshape(-1)] = embedding[self._cycles.reshape(-1)].T
        # Texts of all contenders have new_tokens words: logits of padding and of the end are 0.
        head[:, [PAD, EOS]] = 0
        for variable, value in arrays.values():
            variable.set_value(jnp.asarray(value))

    def prompts(self, call: int, rows: int) -> list[str]:
        """Returns the prompts of one call: those of no other."""
        length = self.shape.prompt_tokens
        if self._is_copying:
            own = self._cycles[np.arange(call * rows, (call + 1) * rows)]
            ids = np.tile(own, -(-length // PERIOD))[:, :length]
        else:
            rng = np.random.default_rng([call, rows])
            ids = rng.integers(EOS + 1, self.shape.vocab_size, (rows, length))
        return [" ".join(map(str, row)) for row in ids]


class Contender:
    """Continues other prompts in each call, as many calls as there are."""

    def __init__(self, weights: Weights, rows: int):
        self.weights, self.rows = weights, rows
        self.token_ids: list[list[list[int]]] = []  # by call and row

    def __call__(self) -> None:
        prompts = self.weights.prompts(len(self.token_ids), self.rows)
        tokens = [row.tolist() for row in self.generate(prompts)]
        assert all(len(row) == self.weights.shape.new_tokens for row in tokens)
        self.token_ids.append(tokens)

    def generate(self, prompts: list[str]) -> Sequence[np.ndarray]:
        raise NotImplementedError

    @property
    def num_traces(self) -> int:
        return 0


class Tunix(Contender):
    """Its own Sampler, as its vanilla rollout calls it."""

    def __init__(self, weights: Weights, rows: int, cache_tokens: int):
        super().__init__(weights, rows)
        shape = weights.shape
        self._sampler = sampler.Sampler(
            weights.model,
            Numbers(),
            sampler.CacheConfig(
                cache_tokens,
                shape.num_layers,
                shape.num_kv_heads,
                shape.head_dim,
            ),
        )

    def generate(self, prompts: list[str]) -> Sequence[np.ndarray]:
        shape = self.weights.shape
        return self._sampler(prompts, shape.new_tokens, shape.prompt_tokens).tokens


class Specjax(Contender):
    """SpecjaxRollout, its rows and their length as the calls need them."""

    def __init__(self, weights: Weights, rows: int, drafter: str | None = None):
        super().__init__(weights, rows)
        shape = weights.shape
        self._config = base_rollout.RolloutConfig(
            max_tokens_to_generate=shape.new_tokens,
            max_prompt_length=shape.prompt_tokens,
            kv_cache_size=shape.kv_cache_size,
            top_p=None,  # greedy
        )
        self.rollout = SpecjaxRollout(
            rollout_actor=weights.model,
            tokenizer=Numbers(),
            mesh=None,
            rollout_config=self._config,
            drafter=drafter,
            num_speculative_tokens=NUM_SPECULATIVE_TOKENS if drafter else None,
            engine=EngineConfig(max_rows=rows),
        )
        self.totals = dict.fromkeys(("num_drafted", "num_accepted", "num_steps"), 0)

    def generate(self, prompts: list[str]) -> Sequence[np.ndarray]:
        tokens = self.rollout.generate(prompts, self._config).tokens
        for name in self.totals:
            self.totals[name] += self.rollout.metrics[name]
        return tokens

    @property
    def num_traces(self) -> int:
        return self.rollout.decoder.num_traces


def run(shape: Shape, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns all figures by name; `say` is told what is being done."""
    figures: dict[str, Any] = {
        "environment": environment(),
        "shape": dataclasses.asdict(shape),
        "kv_cache_size": shape.cache_tokens | {"specjax": shape.kv_cache_size},
        "rounds": rounds,
        "load_average": [os.getloadavg()[0]],
        "plain": {},
    }
    weights = Weights(shape, is_copying=False)
    for rows in shape.batches:
        say(f"plain decoding, batch {rows}")
        contenders = tunix_contenders(weights, rows) | {"specjax": Specjax(weights, rows)}
        figures["plain"][str(rows)] = compare(contenders, rounds)
    del weights
    copying = Weights(shape, is_copying=True)
    say("text that repeats, batch 1")
    contenders = tunix_contenders(copying, 1) | {"specjax": Specjax(copying, 1)}
    contenders |= {drafter: Specjax(copying, 1, drafter) for drafter in DRAFTERS}
    figures["repeating"] = compare(contenders, rounds) | {
        "period": PERIOD,
        "num_speculative_tokens": NUM_SPECULATIVE_TOKENS,
    }
    figures["load_average"].append(os.getloadavg()[0])
    return figures


def tunix_contenders(weights: Weights, rows: int) -> dict[str, Contender]:
    """Returns tunix's sampler with each size of its cache."""
    sizes = weights.shape.cache_tokens
    return {name: Tunix(weights, rows, size) for name, size in sizes.items()}


def compare(contenders: dict[str, Contender], rounds: int) -> dict[str, Any]:
    """Returns tokens per second of each, and of specjax's what they are beside tunix's."""
    calls = warm_up(contenders)
    traces = {name: each.num_traces for name, each in contenders.items()}
    seconds = measuring.interleaved(contenders, rounds, warms_up=False)
    tunix = next(iter(contenders.values()))
    num_tokens = tunix.rows * tunix.weights.shape.new_tokens
    found: dict[str, Any] = {"warm_calls": calls, "tokens_per_call": num_tokens}
    for name, each in contenders.items():
        pairs = [*zip(each.token_ids, tunix.token_ids, strict=True)]
        found[name] = {
            "tokens_per_s": num_tokens / measuring.median(seconds[name]),
            "seconds": [round(value, 4) for value in seconds[name]],
            "calls_compared": len(pairs),
            "calls_with_equal_tokens": sum(own == other for own, other in pairs),
            "traces_while_measured": each.num_traces - traces[name],
        }
        if isinstance(each, Specjax):
            found[name] |= each.totals
            found[name]["over"] = {}
            for other in tunix.weights.shape.cache_tokens:
                over = measuring.ratio_interval(seconds[other], seconds[name])
                found[name]["over"][other] = dict(zip(("ratio", "low", "high"), over, strict=True))
    return found


def warm_up(contenders: dict[str, Contender]) -> int:
    """Calls all until none has compiled anything for a while; returns how often."""
    steady = call = 0
    while call < WARM_CALLS and steady < STEADY_CALLS:
        before = [each.num_traces for each in contenders.values()]
        for each in contenders.values():
            each()
        call += 1
        after = [each.num_traces for each in contenders.values()]
        steady = steady + 1 if after == before else 0
    return call


def environment() -> dict[str, str]:
    """Returns the machine and versions of the figures."""
    versions = {
        name: importlib.metadata.version(package)
        for name, package in (("tunix", "google-tunix"), ("flax", "flax"))
    }
    return measuring.environment() | versions | {"cores": str(os.cpu_count())}


def as_text(figures: dict[str, Any]) -> str:
    """Returns the figures of `run` as lines."""
    lines = [f"{name} {value}" for name, value in figures["environment"].items()]
    lines += [
        f"{name}: {tokens} tokens per row in its cache"
        for name, tokens in figures["kv_cache_size"].items()
    ]
    parts = {f"plain, batch {rows}": part for rows, part in figures["plain"].items()}
    parts["repeating text, batch 1"] = figures["repeating"]
    for what, part in parts.items():
        for name, own in part.items():
            if not isinstance(own, dict):
                continue
            lines.append(
                f"{what:24s} {name:26s} {own['tokens_per_s']:8.1f} tokens/s; equal tokens in "
                f"{own['calls_with_equal_tokens']} of {own['calls_compared']} calls"
            )
            lines += [
                f"{'':51s} {over['ratio']:8.2f} times {other} ({over['low']:.2f} to "
                f"{over['high']:.2f})"
                for other, over in own.get("over", {}).items()
            ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Runs the comparison and prints its figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tunix_sampler",
        description="specjax beside tunix's own sampler, on the same weights",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--rounds", type=int, default=9, help="rounds of each measurement (default 9)"
    )
    options = parser.parse_args(argv)
    compilation_cache.enable()
    figures = run(
        Shape(),
        options.rounds,
        lambda what: print(f"measuring: {what}", file=sys.stderr),
    )
    print(json.dumps(figures, indent=1) if options.json else as_text(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
