"""Makes requests for the engine from a user's arguments, and reports errors in them."""

from __future__ import annotations

import numbers
import secrets
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.config.checks import shown
from specjax.config.engine import EngineConfig
from specjax.config.keywords import made
from specjax.config.rules import Rule
from specjax.config.sampling import SamplingParams
from specjax.config.speculation import SpeculationConfig
from specjax.engine.output_text import text_after
from specjax.engine.request import Request
from specjax.heads.loading import LoadedDrafter
from specjax.models.base import Model
from specjax.runtime.stack_level import of_the_caller
from specjax.sampling import row_values
from specjax.text.chat import Chat
from specjax.types import BY_LAW, DELTA

# Text, the messages of a chat, or token ids.
Prompt = str | Chat | Sequence[Mapping[str, Any]] | Sequence[int]


_EXPECTED = "text, a list of chat messages, a Chat, or a list of whole numbers (token ids)"
_EXPECTED_PROMPTS = f"expected one prompt or a list of them, each {_EXPECTED}."


class Refused(NamedTuple):
    """A request that cannot be served, one per sample."""

    prompt_index: int
    sample_index: int
    seed: int
    error: str


def as_list(prompts: Any) -> list[Any]:
    """Returns a list of prompts from one prompt or many.

    Raises:
      ValueError: there is no prompt, or a value is not one.
    """
    if isinstance(prompts, str | Chat):
        return [prompts]
    if not _is_iterable(prompts):
        raise ValueError(f"prompts are {_shown(prompts)}; {_EXPECTED_PROMPTS}")
    prompts = list(prompts)
    if not prompts:
        raise ValueError("no prompts were given.")
    is_one = isinstance(prompts[0], Mapping) or _is_token(prompts[0])
    return [prompts] if is_one else prompts


def one_each(sampling: Any, target: Model, num_prompts: int) -> list[SamplingParams | ValueError]:
    """Returns sampling parameters per prompt from none, one for all, or one per prompt.

    What they leave open is as the model's generation defaults say. In place of one of several that
    is wrong stands its error.

    Raises:
      ValueError: one for all is wrong, or there are not as many as prompts.
    """
    if not isinstance(sampling, Sequence) or isinstance(sampling, str):
        own = made(SamplingParams, sampling, "sampling").filled(target.generation_defaults)
        return [own] * num_prompts
    if len(sampling) != num_prompts:
        raise ValueError(
            f"{len(sampling)} sampling parameters were given for {num_prompts} prompts; "
            "pass one for all, or one per prompt."
        )
    return [_own_sampling(each, target) for each in sampling]


def _own_sampling(given: Any, target: Model) -> SamplingParams | ValueError:
    try:
        return made(SamplingParams, given, "sampling").filled(target.generation_defaults)
    except ValueError as error:
        return error


def make_requests(
    target: Model,
    prompts: Sequence[Any],
    sampling: Sequence[SamplingParams | ValueError],
    speculation: SpeculationConfig,
    drafter: LoadedDrafter,
    engine_config: EngineConfig,
    *,
    num_before: int = 0,
) -> tuple[list[Request], list[Refused]]:
    """Returns the valid requests, n per prompt, and the refused ones.

    Args:
      sampling: one per prompt; an error stands in for parameters that could not be made.
      num_before: earlier prompts that share rows with these: if prompts of one seed need
        separate noise, prompt i has that of number num_before + i.
    """
    requests: list[Request] = []
    refused: list[Refused] = []
    too_many = 0
    for index, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
        try:
            if isinstance(params, ValueError):
                raise params
            requests += _of_prompt(
                target,
                index,
                prompt,
                params,
                speculation,
                drafter,
                engine_config,
                noise_number=num_before + index,
            )
            if params.speculate:
                too_many = max(too_many, params.num_speculative_tokens or 0)
        except (ValueError, TypeError) as error:
            n = getattr(params, "n", 1)
            n = n if isinstance(n, int) and 1 <= n <= 2**16 else 1
            seed = getattr(params, "seed", None) or 0
            refused.extend(
                Refused(index, sample, seed, f"prompt {index}: {error}") for sample in range(n)
            )
    most = speculation.depth
    if too_many > most:
        drafts = (
            f"this call drafts at most {most}; raise num_speculative_tokens of the call."
            if most
            else "this call has no drafter, or drafts no tokens; give it one, or leave the field "
            "of the request out."
        )
        warnings.warn(
            f"a request asks for num_speculative_tokens={too_many}; {drafts}",
            stacklevel=of_the_caller(),
        )
    return requests, refused


def _of_prompt(
    target: Model,
    index: int,
    prompt: Any,
    params: SamplingParams,
    speculation: SpeculationConfig,
    drafter: LoadedDrafter,
    engine_config: EngineConfig,
    *,
    noise_number: int,
) -> list[Request]:
    """Returns the n requests of one prompt."""
    config = target.config
    params.validate(config.vocab_size)
    params = params.over(config.vocab_size)
    rule = params.verification or speculation.verification
    if rule == "synthetic" and speculation.synthetic_acceptance_rates is None:
        raise ValueError("verification='synthetic' needs the call's synthetic_acceptance_rates.")
    if rule == "greedy" and params.temperature != 0:
        raise ValueError(
            f"verification='greedy' needs temperature 0, got temperature={params.temperature!r}; "
            "use 'seeded', which samples and is exact at any temperature."
        )
    number = Rule.of(rule)
    cap = _draft_cap(params, speculation)
    is_judged = cap != 0 and bool(drafter.effective_rules([number]))
    drafter.check_rule(rule, engine_config.numerics if is_judged else "fast")
    if not is_judged:
        # Without drafts, or without draft distributions, its tokens are the target's own draws.
        number = min(number, DELTA)
    if params.stop_strings and target.tokenizer is None:
        raise ValueError(
            "stop strings need a tokenizer, and this model's folder has none; use stop_token_ids."
        )
    ids = token_ids(target, prompt)
    context = min(config.max_position_embeddings, engine_config.max_context or 2**31)
    room = context - len(ids)
    if room < max(params.min_tokens, 1):
        raise ValueError(
            f"the prompt has {len(ids)} tokens and the context holds {context}, of which the "
            f"output "
            f"needs {max(params.min_tokens, 1)} at least; shorten the prompt."
        )
    seed = int(params.seed) if params.seed is not None else secrets.randbits(63)
    own_seed = seed
    if speculation.max_drafts_per_step is not None and number in BY_LAW:
        # The draft tokens verified for a row depend on other rows' draws, which must be
        # independent of its own: prompts that share a seed get separate noise.
        own_seed = derive_seed(seed, noise_number)
    return [
        Request(
            prompt_index=index,
            sample_index=sample,
            prompt_token_ids=ids,
            params=params,
            seed=seed,
            draft_cap=cap,
            rule=number,
            max_length=len(ids) + min(params.max_tokens, room),
            sampling_values=row_values(
                params,
                prompt_length=len(ids),
                eos_token_ids=config.eos_token_ids,
                seed=derive_seed(own_seed, sample),
                engine_config=engine_config,
            ),
            text=target.tokenizer and text_after(target.tokenizer, ids, params),
        )
        for sample in range(params.n)
    ]


def _draft_cap(params: SamplingParams, speculation: SpeculationConfig) -> int:
    """Returns the K of one request."""
    wanted, most = params.num_speculative_tokens, speculation.depth
    if not params.speculate:
        return 0
    return most if wanted is None else min(wanted, most)


def derive_seed(seed: int, sample: int) -> int:
    """Returns the 64-bit seed of sample i of a request: a bijection of seed for each i.

    Source: the finaliser of SplitMix64 (Steele, Lea and Flood 2014).
    """
    mask = 2**64 - 1
    x = (seed + (sample + 1) * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def token_ids(target: Model, prompt: Any) -> list[int]:
    """Returns the ids of a prompt.

    Raises:
      ValueError: no tokenizer, an empty prompt, or ids outside the vocabulary.
    """
    is_text, is_chat = isinstance(prompt, str), isinstance(prompt, Chat)
    if not is_text and not is_chat:
        if not _is_iterable(prompt):
            raise ValueError(f"a prompt is {_shown(prompt)}; expected {_EXPECTED}.")
        prompt = list(prompt)
        if prompt and isinstance(prompt[0], Mapping):
            prompt, is_chat = Chat(prompt), True
    if is_text or is_chat:
        if target.tokenizer is None:
            raise ValueError(
                f"model {target.name!r} has no tokenizer, so prompts must be lists of token ids, "
                f"not text."
            )
        if is_text:
            ids = target.tokenizer.encode(prompt)
        else:
            ids = target.tokenizer.encode_chat(prompt.messages, **prompt.arguments)
    else:
        if not all(map(_is_token, prompt)):
            wrong = next(token for token in prompt if not _is_token(token))
            raise ValueError(f"a prompt holds {_shown(wrong)}; expected {_EXPECTED}, of one kind.")
        ids = [int(token) for token in prompt]
    if not ids:
        raise ValueError("the prompt is empty; give at least one token.")
    bad = next((token for token in ids if not 0 <= token < target.config.vocab_size), None)
    if bad is not None:
        raise ValueError(
            f"token id {bad} is outside the vocabulary; expected 0 to "
            f"{target.config.vocab_size - 1}."
        )
    return ids


def _is_iterable(value: Any) -> bool:
    """Whether a value can be a list of something; bytes and single messages are none."""
    if isinstance(value, bytes | bytearray | memoryview | Mapping):
        return False
    try:
        iter(value)
    except TypeError:  # a number, None, an array without axes
        return False
    return True


def _shown(value: Any) -> str:
    """Returns a value and its type, for a message."""
    if value is None:
        return "None"
    text = shown(value, 61)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"{text} ({type(value).__name__})"


def _is_token(value: Any) -> bool:
    """Whether a value is a whole number, of Python, numpy or jax, and no array of them."""
    if isinstance(value, bool):
        return False
    is_scalar = getattr(value, "ndim", None) == 0 and np.issubdtype(value.dtype, np.integer)
    return isinstance(value, numbers.Integral) or is_scalar
