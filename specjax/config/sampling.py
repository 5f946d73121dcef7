"""Sampling parameters of a request, and the rules by which it ends."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

from specjax.config.checks import FLOAT32_MAX, is_bias, is_int, is_sized
from specjax.config.keywords import holds_fields
from specjax.config.rules import VERIFICATION_RULES, VerificationRule, unknown_rule

# What a model's generation_config.json may say, and the values where neither it nor a user does.
OF_MODEL: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


@holds_fields("sampling")
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class SamplingParams:
    """Sampling parameters of one request, with the names of vLLM's and the order of its steps.

    Wherever they are taken, a mapping of some is taken too: sampling={"max_tokens": 64}.

    What is not given, temperature to frequency_penalty, is as the model's generation_config.json
    says, and where that says nothing the value in the comment. So do `generate`, `stream`,
    `Engine` and the command line; `Completion.sampling` has the values that were used. `rollout`
    and all else of reinforcement learning never look into that file: there it is always the value
    in the comment, temperature 1 and nothing cut, so that the policy itself is sampled.

    Logits pass: allowed ids, bad ids, logit_bias, min_tokens, penalties, temperature, min_p,
    top_k, top_p. All of them work with speculation. Where vLLM and transformers mean something
    else by a name or a value: docs/sampling-meaning.md.

    The first min_tokens output tokens hold no stop token, and a stop string that one
    of them completes does not end the output; it is text like any other. One that
    begins among them and is completed by a later token does. A stop string that holds a special
    token is completed by that token, also where the text leaves special tokens out.

    The text of an output is what its tokens add to the text of its prompt: a first word keeps its
    space.

    `seed`, from 0 to 2**64 - 1 (-1 is none), makes the text a function of (weights, prompt, these
    parameters, seed). Under the rules that keep only the distribution (`rejection` and those
    after it) the text also depends on what is drafted. Without a seed, fresh entropy is drawn,
    and reported in the result. Sample i of n uses a seed derived from (seed, i).

    Raises:
      ValueError: at construction, if a value is invalid or two contradict.
    """

    temperature: float | None = None  # 1; 0 is greedy
    top_k: int | None = None  # 0; 0 or -1: off
    top_p: float | None = None  # 1
    min_p: float | None = None  # 0
    repetition_penalty: float | None = None  # 1; over prompt and output
    presence_penalty: float | None = None  # 0; over output
    frequency_penalty: float | None = None  # 0; over output, per occurrence
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    bad_token_ids: Sequence[int] = ()
    allowed_token_ids: Sequence[int] | None = None
    min_tokens: int = 0  # the first so many tokens neither stop nor complete a stop string
    max_tokens: int = 128
    stop_token_ids: Sequence[int] = ()
    stop: str | Sequence[str] | None = ()  # stop strings, cut from the text
    # Keeps a stop string in the text, and a stop token that the text does not leave out.
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True  # leaves special tokens, as [TOOL_CALLS], out of the text
    # False, with skip_special_tokens=False: no space between added tokens in a row, where the
    # tokenizer's decoder puts one.
    spaces_between_special_tokens: bool = True
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    # k: of the chosen token and the k most likely; 0: chosen only; -1: of the whole vocabulary,
    # for which EngineConfig.max_logprobs must have room.
    logprobs: int | None = None
    # Whether to return the entropy of each token's distribution; needs logprobs.
    entropy: bool = False
    num_speculative_tokens: int | None = None  # this request's own K; 0 is off
    # False is plain decoding for this request alone, whatever num_speculative_tokens says:
    # the same text under `greedy`, `seeded` and `delta`.
    speculate: bool = True
    verification: VerificationRule | None = None  # this request's own rule; by default the call's
    self_check: bool = False  # tests draws against their distribution, see Completion.self_check

    def __post_init__(self):
        if is_int(self.seed) and self.seed == -1:
            object.__setattr__(self, "seed", None)
        self.validate()

    def __repr__(self) -> str:
        """Returns what differs from SamplingParams(), as it is written."""
        own = (
            f"{field.name}={value!r}"
            for field in dataclasses.fields(self)
            if not _is_default(value := getattr(self, field.name), field)
        )
        return f"SamplingParams({', '.join(own)})"

    def filled(self, generation_defaults: Mapping[str, Any]) -> SamplingParams:
        """Returns these parameters with a value for each that was not given.

        Args:
          generation_defaults: of the model, which win over the library's: those of OF_MODEL, and
            do_sample, of which False is temperature 0 and leaves the others as they are.
        """
        values = {**OF_MODEL, **generation_defaults}
        if generation_defaults.get("do_sample") is False:
            values["temperature"] = 0.0
        missing = {name: values[name] for name in OF_MODEL if getattr(self, name) is None}
        return dataclasses.replace(self, **missing) if missing else self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def over(self, vocab_size: int) -> SamplingParams:
        """Returns these with logprobs=-1 as the number of all tokens."""
        if self.logprobs != -1:
            return self
        return dataclasses.replace(self, logprobs=vocab_size)

    def validate(self, vocab_size: int | None = None, eos_token_ids: Sequence[int] = ()) -> None:
        """Raises if a value is invalid or two contradict, naming the parameter.

        Called when parameters are made, and with the model's arguments when a request is made.

        Args:
          vocab_size: token ids must be below it, if given.
          eos_token_ids: stop tokens of the model, unless `ignore_eos`.

        Raises:
          ValueError: a value is out of range or of the wrong type.
        """
        for name, low, high in _RANGES:
            value: Any = getattr(self, name)
            if value is None and name in OF_MODEL:
                continue
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not is_number or not low <= cast(float, value) <= high:
                what = "is out of range" if is_number else f"is a {type(value).__name__}"
                raise ValueError(
                    f"{name}={value!r} {what}; expected a number from {low} to {high}."
                )
        if self.repetition_penalty is not None and self.repetition_penalty <= 0:
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty!r} must be above 0; 1 is off."
            )
        for name in ("top_k", "min_tokens", "max_tokens", "n"):
            value = getattr(self, name)
            if not is_int(value) and not (value is None and name in OF_MODEL):
                raise ValueError(f"{name}={value!r} must be a whole number.")
        for name, least in (("logprobs", -1), ("num_speculative_tokens", 0)):
            value = getattr(self, name)
            if value is not None and (not is_int(value) or value < least):
                raise ValueError(
                    f"{name}={value!r} must be a whole number of at least {least}, or None."
                )
        seed = self.seed
        if seed is not None and not (is_int(seed) and 0 <= operator.index(seed) < 2**64):
            raise ValueError(
                f"seed={seed!r} must be a whole number from 0 to 2**64 - 1, or None (or -1) for "
                "a new one each time."
            )
        if self.verification not in (None, *VERIFICATION_RULES):
            raise ValueError(unknown_rule(self.verification))
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens!r} exceeds max_tokens={self.max_tokens!r}; lower "
                f"min_tokens or raise max_tokens."
            )
        for name in _SWITCHES:
            if getattr(self, name) not in (True, False):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False.")
        if self.entropy and self.logprobs is None:
            raise ValueError(
                "entropy=True comes with the log-probabilities; set logprobs=0 or more."
            )
        is_many = self.stop is None or is_sized(self.stop)
        if not is_many or any(not isinstance(text, str) or not text for text in self.stop_strings):
            raise ValueError(f"stop={self.stop!r} must hold non-empty strings.")
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias={self.logit_bias!r} must map token ids to numbers.")
        if not all(map(is_bias, self.logit_bias.values())):
            raise ValueError(
                f"logit_bias={self.logit_bias!r} must hold finite numbers of float32, at most "
                f"{FLOAT32_MAX:.3g} in size (or -inf to forbid a token)."
            )
        self._validate_token_ids(vocab_size)
        if self.allowed_token_ids is not None:
            self._validate_allowed(self.allowed_token_ids, eos_token_ids)

    def _validate_allowed(self, allowed: Sequence[int], eos_token_ids: Sequence[int]) -> None:
        """Raises if the other parameters forbid every one of allowed_token_ids."""
        left = set(map(int, allowed))
        if not left:
            raise ValueError(
                "allowed_token_ids is empty, so no token could be chosen; pass None to allow all."
            )
        left -= set(map(int, self.bad_token_ids))
        left -= {int(i) for i, bias in self.logit_bias.items() if bias == -math.inf}
        if not left:
            raise ValueError(
                "bad_token_ids (or logit_bias of -inf) forbids every one of "
                "allowed_token_ids; no token could be chosen."
            )
        stops = {*map(int, self.stop_token_ids)}
        stops.update(() if self.ignore_eos else map(int, eos_token_ids))
        if self.min_tokens > 0 and not left - stops:
            raise ValueError(
                f"min_tokens={self.min_tokens} forbids stop tokens, and nothing else is "
                "left of allowed_token_ids; allow another token, or set min_tokens=0."
            )

    def _validate_token_ids(self, vocab_size: int | None) -> None:
        groups = {
            "logit_bias": list(self.logit_bias),
            "bad_token_ids": self.bad_token_ids,
            "allowed_token_ids": () if self.allowed_token_ids is None else self.allowed_token_ids,
            "stop_token_ids": self.stop_token_ids,
        }
        for name, ids in groups.items():
            if not is_sized(ids):
                raise ValueError(f"{name}={ids!r} must be a sequence of token ids.")
            for token_id in ids:
                if (
                    not is_int(token_id)
                    or token_id < 0
                    or (vocab_size is not None and token_id >= vocab_size)
                ):
                    raise ValueError(
                        f"{name} holds {token_id!r}, which is no token id; expected whole numbers "
                        f"from 0 "
                        f"to {'the vocabulary size' if vocab_size is None else vocab_size - 1}."
                    )


_SWITCHES = (
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "ignore_eos",
    "speculate",
    "self_check",
    "entropy",
)
# What is taken wherever parameters are.
SamplingSource: TypeAlias = SamplingParams | Mapping[str, Any]

_RANGES = (
    ("temperature", 0.0, 100.0),
    ("top_k", -1, 2**31 - 1),
    ("top_p", 1e-6, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.0, 1e6),
    ("presence_penalty", -1e6, 1e6),
    ("frequency_penalty", -1e6, 1e6),
    ("min_tokens", 0, 2**31 - 1),
    ("max_tokens", 1, 2**31 - 1),
    ("n", 1, 2**16),
)


def _is_default(value: Any, field: dataclasses.Field[Any]) -> bool:
    has_factory = field.default is dataclasses.MISSING
    default = field.default_factory() if has_factory else field.default  # pyright: ignore
    # Arrays compare element by element.
    return type(value) is type(default) and bool(value == default)
