"""Says what a keyword of another library, or a misspelt one, is called here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from specjax.config.checks import shown
from specjax.config.names import ELSEWHERE, SIMILARITY, closest

Function = TypeVar("Function", bound=Callable[..., Any])
Config = TypeVar("Config")
Class = TypeVar("Class", bound=type)

# Names of transformers, vLLM, SGLang, OpenAI and llama.cpp, and the one of the same meaning here;
# two where a function and a config call it differently.
RENAMED = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "num_samples": "n",
    "temp": "temperature",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "repeat_penalty": "repetition_penalty",
    "top_logprobs": "logprobs",
    "suppress_tokens": "bad_token_ids",
    "random_seed": "seed",
    "sampling_seed": "seed",
    "sampling_params": "sampling",
    "generation_config": "sampling",
    "num_generations": "num_samples",
    "group_size": "num_samples",
    "max_num_seqs": "max_rows",
    "max_batch_size": "max_rows",
    "batch_size": "max_rows",
    "max_running_requests": "max_rows",
    "max_model_len": "max_context",
    "max_seq_len": "max_context",
    "context_length": "max_context",
    "block_size": "page_size",
    "num_gpu_blocks_override": "num_pages",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "enable_prefix_caching": "prefix_caching",
    "max_num_batched_tokens": "max_prefill_tokens",
    "chunked_prefill_size": "max_prefill_tokens",
    "engine_config": "engine",
    "use_tqdm": "progress",
    "model": "target",
    "target_model": "target",
    "prompt": "prompts",
    "messages": "prompts",
    "inputs": "prompts",
    "assistant_model": "drafter model",
    "draft_model": "drafter model",
    "speculative_model": "drafter model",
    "num_assistant_tokens": "num_speculative_tokens",
    "num_draft_tokens": "num_speculative_tokens",
    "speculative_num_steps": "num_speculative_tokens",
    "speculative_eagle_topk": "tree_top_k",
    "speculative_num_draft_tokens": "num_draft_nodes",
    "max_matching_ngram_size": "prompt_lookup_max",
    "speculation": "speculative_config",
    "torch_dtype": "dtype",
}
# Likewise, of options of command lines alone.
OPTIONS = {
    **dict.fromkeys(("prompt_file", "prompts_file", "input", "input_file", "file"), "prompts"),
    **dict.fromkeys(("output_file", "output_dir", "o"), "output out"),
    "output": "out",
    "out": "output",
    "target": "model",
    "model": "target",
    "m": "model target",
    "batch_size": "max_rows rows",
    **dict.fromkeys(("tensor_parallel_size", "tp_size", "tp"), "tensor_parallel"),
    **dict.fromkeys(("epochs", "num_epochs", "num_steps", "max_steps"), "steps"),
    "lr": "learning_rate",
    "k": "num_speculative_tokens",
}
_NOT_STRUCTURED = (
    "text is not held to a grammar here; allowed_token_ids restricts tokens, and n draws several "
    "texts to choose from"
)
_NO_BEAMS = "there is no beam search; n draws several texts, logprobs tells which is likelier"
_MESH = "pass a jax mesh with an axis 'tensor' or 'data' as mesh=; `--mesh tensor=2` makes one"
_PRINTED = "specjax.stream yields text as it comes; `specjax generate` writes one prompt's so"
_CHAT = (
    "specjax.Chat(messages, ...) is a prompt with arguments of the chat template; "
    "--chat-arguments JSON on the command line"
)
_MESSAGES = (
    'a list of messages of any role is a prompt; on the command line "messages" in a line of '
    "--prompts"
)
_LOGGED = "the logger 'specjax' says at level INFO what was compiled, and why K was what it was"
# Names without an equal here, and what to do instead.
INSTEAD = {
    "do_sample": "do_sample=False is temperature=0 of SamplingParams, do_sample=True any other",
    "max_length": "max_tokens counts the tokens of the output alone",
    "min_length": "min_tokens counts the tokens of the output alone",
    "num_beams": _NO_BEAMS,
    "num_beam_groups": _NO_BEAMS,
    "use_beam_search": _NO_BEAMS,
    "length_penalty": _NO_BEAMS,
    "early_stopping": _NO_BEAMS,
    "best_of": "draw n texts, and choose by logprobs",
    **dict.fromkeys(
        (
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "guided_decoding",
            "guided_decoding_backend",
            "structured_outputs",
            "response_format",
            "json_schema",
            "grammar",
            "regex",
            "ebnf",
        ),
        _NOT_STRUCTURED,
    ),
    "logits_processors": "logit_bias, bad_token_ids and allowed_token_ids change logits",
    "logits_processor": "logit_bias, bad_token_ids and allowed_token_ids change logits",
    "bad_words": "bad_token_ids forbids single tokens",
    "bad_words_ids": "bad_token_ids forbids single tokens",
    "sequence_bias": "logit_bias is of single tokens",
    "no_repeat_ngram_size": "repetition_penalty and frequency_penalty lower repeated tokens",
    "typical_p": "min_p and top_p cut unlikely tokens",
    "epsilon_cutoff": "min_p cuts unlikely tokens",
    "eta_cutoff": "min_p cuts unlikely tokens",
    "prompt_logprobs": "specjax.score returns log-probabilities of given text",
    "output_scores": "logprobs=k returns those of the chosen and the k likeliest tokens",
    "output_logits": "logprobs=k returns those of the chosen and the k likeliest tokens",
    "return_dict_in_generate": "results always carry text, ids and statistics; leave it out",
    **dict.fromkeys(("streamer", "stream", "streaming"), _PRINTED),
    "greedy": "temperature 0 takes the likeliest token",
    **dict.fromkeys(("system", "system_prompt"), _MESSAGES),
    "interactive": ELSEWHERE["interactive"],
    **dict.fromkeys(("verbose", "log_level"), _LOGGED),
    "quiet": "bars are shown on a terminal alone; progress=False of a program turns them off",
    "enable_thinking": _CHAT,
    "max_time": "deadline_s of Engine.add, or time_budget_s of rollout, ends a text in time",
    "timeout": "deadline_s of Engine.add, or time_budget_s of rollout, ends a text in time",
    "use_cache": "keys and values are always kept; leave it out",
    "eos_token_id": "stop_token_ids=[...] are tokens that end a text, beside those of the model",
    "detokenize": "results carry text and token_ids; leave it out",
    "generator": "seed=... makes draws repeatable",
    "lora_request": "merge the adapter into the weights before they are loaded",
    "pad_token_id": "rows of any length run together without padding; leave it out",
    "attention_mask": "rows of any length run together without padding; leave it out",
    "truncate_prompt_tokens": "cut the prompt's token ids before",
    **dict.fromkeys(("tools", "chat_template", "chat_template_kwargs"), _CHAT),
    **dict.fromkeys(("add_generation_prompt", "continue_final_message"), _CHAT),
    "prompt_lookup_num_tokens": "drafter='ngram' with num_speculative_tokens",
    "assistant_confidence_threshold": "the default policy chooses how many tokens are drafted",
    "gpu_memory_utilization": "memory_bytes=... says how many bytes of each device are used",
    "mem_fraction_static": "memory_bytes=... says how many bytes of each device are used",
    "swap_space": "requests that lose their pages are computed again; leave it out",
    "enforce_eager": "XLA compiles every step; leave it out",
    "enable_chunked_prefill": "prompts are always fed in chunks, of max_prefill_tokens",
    "tensor_parallel_size": _MESH,
    "data_parallel_size": _MESH,
    "tp_size": _MESH,
    "tp": _MESH,
    "tensor_parallel": _MESH,
    "dp_size": _MESH,
    "device_map": _MESH,
    "device": "arrays go to jax's default device, or over a mesh=",
    "quantization": "a folder's weights are taken as it has them; kv_cache_dtype is of the pages",
    "load_in_8bit": "specjax.save_pretrained(..., stored='int8') makes a folder of int8 weights",
    "load_in_4bit": "drafter='self-int4' drafts with 4 bits; the target stays as it is",
    "trust_remote_code": "no code is loaded with a model; leave it out",
    "revision": "download that revision, and pass its folder",
    "rejection_sample_method": "speculative_config={...} takes vLLM's keys",
}
_fields_of: dict[str, tuple[str, ...]] = {}  # by the argument of functions that takes them


def meant(name: str, known: Collection[str], similarity: float = SIMILARITY) -> str | None:
    """Returns the known name of the same meaning, or that `name` misspells; None if neither."""
    renamed = next((own for own in _renamed(name) if own in known), None)
    return closest(name, known, similarity) if renamed is None else renamed


def holder(field: str) -> str | None:
    """Returns the argument of functions that takes a mapping with this field, or None."""
    return next((argument for argument, held in _fields_of.items() if field in held), None)


def _renamed(name: str) -> list[str]:
    return RENAMED.get(name, "").split()


def advice(name: str, known: Collection[str], value: Any = None) -> str:
    """Returns the end of a message about an unknown name: "; did you mean ...?", or nothing.

    Args:
      known: the names that are there. One of them may hold others, as `sampling` does.
      value: what was given under the name, for the text to write instead.
    """
    own = shown(value, 40) if value is not None and len(shown(value, 41)) < 41 else "..."
    if name in INSTEAD:
        return f"; {INSTEAD[name]}"
    for renamed in _renamed(name):
        if renamed in known:
            return f"; did you mean {renamed}={own}?"
    # Its holder may not be taken here: then it says where the name belongs.
    for argument, fields in _fields_of.items():
        for field in _renamed(name) or (name,):
            if field in fields:
                is_here = "write" if argument in known else "it belongs to"
                return f"; {is_here} {argument}={{{field!r}: {own}}}"
    if (near := closest(name, known)) is not None:
        return f"; did you mean {near}={own}?"
    held = {field: a for a, fields in _fields_of.items() if a in known for field in fields}
    if (near := closest(name, held)) is not None:
        return f"; did you mean {held[near]}={{{near!r}: {own}}}?"
    return ""


def keyword_check(
    function: Callable[..., Any], name: str | None = None
) -> Callable[[Mapping[str, Any]], None]:
    """Returns what raises TypeError for a keyword that a function does not take, and says what to
    write. It takes the keywords of a call, and lets any pass to a function of `**arguments`.

    Args:
      name: of a function that passes its keywords on to this one.
    """
    parameters, name = inspect.signature(function).parameters, name or function.__qualname__
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return lambda given: None

    def check(given: Mapping[str, Any]) -> None:
        for keyword, value in given.items():
            if keyword not in parameters:
                raise TypeError(
                    f"{name}() got an unexpected keyword argument {keyword!r}"
                    f"{advice(keyword, parameters, value)}"
                )

    return check


def checks_keywords(function: Function) -> Function:
    """Decorates a function with the check of its keywords."""
    check = keyword_check(function)

    @functools.wraps(function)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        check(keywords)
        return function(*arguments, **keywords)

    return checked  # pyright: ignore[reportReturnType]


def hints_at(attributes: Mapping[str, str]) -> Callable[[Class], Class]:
    """Returns a decorator of a class that says what to write for attributes it does not have.

    Args:
      attributes: names as other libraries have them, and what is here in their place.
    """

    def missing(self: Any, name: str) -> Any:
        if name in attributes:
            kind = type(self).__name__
            article = "an" if kind[0] in "AEIOU" else "a"
            said = f"{article} {kind} has no attribute {name!r}; {attributes[name]}."
            raise AttributeError(said, name=name, obj=self)
        return object.__getattribute__(self, name)  # raises what it would without this

    def decorate(cls: Class) -> Class:
        cls.__getattr__ = missing
        return cls

    return decorate


def holds_fields(argument: str) -> Callable[[type[Config]], type[Config]]:
    """Returns a decorator of a config's class, whose fields functions take as a mapping.

    Args:
      argument: the name of that argument of functions.
    """

    def decorate(cls: type[Config]) -> type[Config]:
        _fields_of[argument] = tuple(inspect.signature(cls).parameters)
        cls.__init__ = checks_keywords(cls.__init__)
        return cls

    return decorate


def made(cls: type[Config], given: Any, argument: str) -> Config:
    """Returns a config from one, from a mapping of its fields, or from None.

    Raises:
      ValueError: `given` is none of these, a key is no field, or a value is invalid.
    """
    if isinstance(given, cls):
        return given
    if not isinstance(given, Mapping | None):
        kind = f"{'an' if cls.__name__[0] in 'AEIOU' else 'a'} {cls.__name__}"
        raise ValueError(f"{argument}={shown(given)} must be {kind} or a mapping of its fields.")
    given = {} if given is None else given
    known = _fields_of[argument]
    for name, value in given.items():
        if name not in known:
            told = advice(str(name), known, value) or f"; expected any of {', '.join(known)}."
            raise ValueError(
                f"{argument} has the key {name!r:.100}, which is no field of {cls.__name__}{told}"
            )
    return cls(**given)
