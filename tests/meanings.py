"""What sampling parameters mean to vLLM, transformers and specjax: docs/sampling-meaning.md.

A row holds a question, one answer per library, and how to ask each. vLLM and transformers are
imported only where they are asked. A library that has no such thing is not asked: None.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

VOCAB = 8
EOS = 7
NO = -math.inf  # the logit of a token that cannot be drawn
LIBRARIES = ("vllm", "transformers", "specjax")
REFUSED = "refused"


class Situation(NamedTuple):
    """Logits of one step, and what was said before."""

    logits: Sequence[float]  # the rest of the vocabulary has none
    prompt: Sequence[int] = (6,)
    output: Sequence[int] = ()

    @property
    def row(self) -> np.ndarray:
        """The logits of the whole vocabulary, f32[1, VOCAB]."""
        missing = VOCAB - len(self.logits)
        return np.array([[*self.logits, *[NO] * missing]], np.float32)


class Row(NamedTuple):
    """A fact, and how it is found out."""

    answers: tuple[Any, Any, Any]  # in the order of LIBRARIES
    vllm: Callable[[], Any] | None
    transformers: Callable[[], Any] | None
    specjax: Callable[[], Any] | None


def of_probabilities(*probabilities: float) -> Situation:
    return Situation([math.log(p) for p in probabilities])


def kept(logits: np.ndarray) -> list[int]:
    """Returns the tokens that can be drawn."""
    return np.flatnonzero(logits > NO).tolist()


def values(logits: np.ndarray, count: int = 4) -> list[float]:
    return [round(float(value), 3) for value in logits[:count]]


def gap(logits: np.ndarray) -> float:
    return round(float(logits[0] - logits[1]), 2)


def answer_of(ask: Callable[[], Any]) -> Any:
    """Returns what a library says, REFUSED where it raises its error of a wrong value."""
    try:
        return ask()
    except Exception as error:
        if isinstance(error, ValueError) or type(error).__name__ == "VLLMValidationError":
            return REFUSED
        raise


def processed(
    answers: tuple[Any, Any, Any],
    situation: Situation,
    show: Callable[[np.ndarray], Any],
    params: Mapping[str, Any],
    *,
    of_vllm: Mapping[str, Any] | None = None,
    of_transformers: Mapping[str, Any] | None = None,
) -> Row:
    """Returns a row about the logits that tokens are drawn from.

    Args:
      params: specjax's; the others have the same unless theirs are given.
    """
    others = {**params} if of_transformers is None else of_transformers
    return Row(
        answers,
        lambda: show(in_vllm(situation, **(params if of_vllm is None else of_vllm))),
        None if answers[1] is None else lambda: show(in_transformers(situation, **others)),
        lambda: show(in_specjax(situation, **params)),
    )


def in_specjax(situation: Situation, **params: Any) -> np.ndarray:
    import jax.numpy as jnp

    from specjax.config.engine import EngineConfig
    from specjax.config.sampling import SamplingParams
    from specjax.sampling import RowSampling, row_values

    fields = row_values(
        SamplingParams(**params),
        prompt_length=len(situation.prompt),
        eos_token_ids=(EOS,),
        seed=0,
        engine_config=EngineConfig(max_bias_entries=4, max_allowed_tokens=4, max_stop_tokens=4),
    )
    history = [*situation.prompt, *situation.output]
    logits = _process()(
        jnp.asarray(situation.row),
        RowSampling(**{name: jnp.asarray(value[None]) for name, value in fields.items()}),
        jnp.zeros(1, jnp.int32),
        jnp.full(1, len(history) - 1, jnp.int32),
        jnp.asarray([history + [0] * (VOCAB - len(history))], jnp.int32),
    )
    return np.asarray(logits)[0]


@functools.cache
def _process() -> Callable[..., Any]:
    import jax

    from specjax import sampling

    return jax.jit(sampling.process_logits)


def in_transformers(situation: Situation, **params: Any) -> np.ndarray:
    import torch

    model = tiny_llama()
    params = {"do_sample": True, "top_k": 0, **params}
    settings = model._prepare_generation_config(None, **params)[0]
    model._prepare_special_tokens(settings)
    processors = model._get_logits_processor(
        settings, input_ids_seq_length=len(situation.prompt), device="cpu"
    )
    ids = torch.tensor([[*situation.prompt, *situation.output]])
    return processors(ids, torch.tensor(situation.row))[0].numpy()


@functools.cache
def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    config = LlamaConfig(vocab_size=VOCAB, eos_token_id=EOS, bos_token_id=6, pad_token_id=0, **size)
    return LlamaForCausalLM(config).eval()


def in_vllm(situation: Situation, returned: str = "processed_logits", **params: Any) -> np.ndarray:
    """Returns what vLLM's sampler draws from, or other `returned` values of its modes."""
    import torch
    from vllm.v1.sample.sampler import Sampler

    sampler = Sampler(logprobs_mode=returned)
    drawn = sampler(torch.tensor(situation.row), _vllm_metadata(situation, **params))
    return drawn.logprobs_tensors.logprobs[0].numpy()


def vllm_params(**params: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**params)


def _vllm_metadata(situation: Situation, *, bad_words: Sequence[Any] = (), **params: Any) -> Any:
    """Returns what vLLM's sampler is told of one request.

    Args:
      bad_words: sequences of token ids, as its tokenizer would make them.
    """
    import torch
    from vllm.v1.sample import logits_processor as processors
    from vllm.v1.sample.logits_processor.interface import BatchUpdate
    from vllm.v1.sample.metadata import SamplingMetadata

    said = vllm_params(**params)
    said.update_from_generation_config({}, EOS)
    sizes = types.SimpleNamespace(scheduler_config=types.SimpleNamespace(max_num_seqs=1))
    kinds = ("MinTokens", "LogitBias", "MinP")
    built = [
        getattr(processors, f"{kind}LogitsProcessor")(sizes, torch.device("cpu"), False)
        for kind in kinds
    ]
    output = list(situation.output)
    for each in built:
        each.update_state(BatchUpdate(1, (), [(0, said, list(situation.prompt), output)], ()))
    allowed = said.allowed_token_ids
    mask = None if allowed is None else ~torch.isin(torch.arange(VOCAB), torch.tensor(allowed))
    return SamplingMetadata(
        temperature=torch.tensor([said.temperature]),
        all_greedy=False,
        all_random=True,
        top_p=None if said.top_p == 1 else torch.tensor([said.top_p]),
        top_k=None if said.top_k < 1 else torch.tensor([said.top_k]),
        generators={},
        max_num_logprobs=-1,
        no_penalties=False,
        prompt_token_ids=torch.tensor([list(situation.prompt)]),
        frequency_penalties=torch.tensor([said.frequency_penalty]),
        presence_penalties=torch.tensor([said.presence_penalty]),
        repetition_penalties=torch.tensor([said.repetition_penalty]),
        output_token_ids=[output],
        allowed_token_ids_mask=None if mask is None else mask[None],
        bad_words_token_ids={0: [list(word) for word in bad_words]} if bad_words else {},
        logitsprocs=processors.LogitsProcessors(built),
    )


def of_params(
    answers: tuple[Any, Any, Any],
    show: Callable[[Any], Any],
    params: Mapping[str, Any],
    of_transformers: Callable[[], Any] | None = None,
) -> Row:
    """Returns a row about what becomes of parameters when they are made."""

    def in_ours() -> Any:
        from specjax.config.sampling import SamplingParams

        return show(SamplingParams(**params).filled({}))

    return Row(answers, lambda: show(vllm_params(**params)), of_transformers, in_ours)


def transformers_default(name: str) -> Any:
    """Returns the value of a setting that nobody gave."""
    return getattr(tiny_llama()._prepare_generation_config(None, do_sample=True)[0], name)


def generated(**settings: Any) -> Any:
    """Returns what transformers generates after a prompt of one token."""
    import torch

    ids = torch.tensor([[6]])
    mask = torch.ones_like(ids)
    return tiny_llama().generate(ids, attention_mask=mask, **settings)


# The table, its rows by their first cells.
SHARP, FLAT = of_probabilities(0.6, 0.4), of_probabilities(0.25, 0.25, 0.25, 0.25)
NOTHING = Situation([0.0] * VOCAB)
SPOKEN = Situation([0.0] * VOCAB, prompt=(0,), output=(1, 1, 2))
STEP_ROWS = {
    "temperature, then `top_p`": processed(
        ([0, 1], [0, 1], [0, 1]),
        of_probabilities(0.7, 0.2, 0.1),
        kept,
        {"temperature": 2.0, "top_p": 0.6},
    ),
    "`top_k`, then `top_p`": processed(
        ([0], [0], [0]), of_probabilities(0.4, 0.3, 0.2, 0.1), kept, {"top_k": 2, "top_p": 0.5}
    ),
    "`min_p` and `top_p`": processed(
        ([0], [0, 1], [0]),
        of_probabilities(0.5, 0.3, 0.1, 0.1),
        kept,
        {"min_p": 0.4, "top_p": 0.6},
    ),
    "equal logits where `top_p` ends": processed(
        ([2, 3], [2, 3], [0, 1, 2, 3]), FLAT, kept, {"top_p": 0.5}
    ),
    "equal logits where `top_k` ends": processed(
        ([0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]),
        of_probabilities(0.4, 0.2, 0.2, 0.2),
        kept,
        {"top_k": 2},
    ),
    "`logit_bias`, then `repetition_penalty`": processed(
        ([1.0, 0.0], [1.0, 0.0], [1.0, 0.0]),
        Situation([1.0, 0.0], prompt=(0,)),
        lambda logits: [gap(logits), 0.0],
        {"logit_bias": {0: 1.0}, "repetition_penalty": 2.0},
        of_transformers={"sequence_bias": [[[0], 1.0]], "repetition_penalty": 2.0},
    ),
    "`repetition_penalty`": processed(
        # Relative to a token that nobody said.
        *([([-0.5, -3.0, 0.0, -2.0],) * 3]),
        Situation([1.0, -1.0, 1.0, -1.0, 1.0], prompt=(0, 1), output=(1,)),
        lambda logits: values(logits - logits[4]),
        {"repetition_penalty": 2.0},
    ),
    "`presence_penalty`, `frequency_penalty`": processed(
        ([0.0, -1.0, -0.75, 0.0], None, [0.0, -1.0, -0.75, 0.0]),
        SPOKEN,
        lambda logits: values(logits - logits[3]),
        {"presence_penalty": 0.5, "frequency_penalty": 0.25},
    ),
    "a bad word of two tokens that begins in the prompt": Row(
        ("allowed", "forbidden", None),
        lambda: _after_prompt(in_vllm(NOTHING, bad_words=[[6, 5]])),
        lambda: _after_prompt(in_transformers(NOTHING, bad_words_ids=[[6, 5]])),
        None,
    ),
    "the end-of-text token among bad words": processed(
        ("forbidden", "allowed", "forbidden"),
        NOTHING,
        lambda logits: "allowed" if EOS in kept(logits) else "forbidden",
        {"bad_token_ids": [EOS, 5]},
        of_vllm={"bad_words": [[EOS], [5]]},
        of_transformers={"bad_words_ids": [[EOS], [5]]},
    ),
    "`min_tokens` forbids": processed(
        ([5, EOS], [EOS], [5, EOS]),
        NOTHING,
        lambda logits: sorted({*range(VOCAB)} - {*kept(logits)}),
        {"min_tokens": 2, "stop_token_ids": [5]},
        of_transformers={"min_new_tokens": 2},
    ),
    "`min_tokens` with `ignore_eos`": processed(
        ("forbidden", None, "allowed"),
        NOTHING,
        lambda logits: "allowed" if EOS in kept(logits) else "forbidden",
        {"min_tokens": 2, "ignore_eos": True},
    ),
    "`allowed_token_ids`": processed(
        ([1, 2], None, [1, 2]), NOTHING, kept, {"allowed_token_ids": [1, 2]}
    ),
    "`temperature=0.001`": processed((40.55, 405.47, 405.47), SHARP, gap, {"temperature": 0.001}),
}


def _after_prompt(logits: np.ndarray) -> str:
    return "allowed" if 5 in kept(logits) else "forbidden"


def _greedy(**params: Any) -> Row:
    of_transformers = {"do_sample": False, "num_return_sequences": params.get("n", 1)}
    return of_params(
        params.pop("answers"),
        lambda made: made.n,
        {"temperature": 0.0, **params},
        lambda: len(generated(max_new_tokens=1, **of_transformers)),
    )


def _scores_of_transformers() -> str:
    asked = dict(output_scores=True, return_dict_in_generate=True, max_new_tokens=1)
    scores = generated(do_sample=True, top_k=2, **asked).scores[0][0].numpy()
    return "processed" if len(kept(scores)) == 2 else "raw"


def _scores_of_vllm() -> str:
    import inspect

    from vllm.v1.sample.sampler import Sampler

    usual = inspect.signature(Sampler).parameters["logprobs_mode"].default
    return "raw" if len(kept(in_vllm(NOTHING, usual, top_k=2, logit_bias={1: 1.0}))) == 8 else ""


def _scores_of_specjax() -> str:
    from specjax.engine.request import TokenLogProbs

    return "both" if {"raw", "processed"} <= {*TokenLogProbs.__annotations__} else ""


def _bias_of_server() -> float:
    from vllm import SamplingParams

    return SamplingParams.from_optional(logit_bias={1: 500.0}).logit_bias[1]


def _room_for_all(made: Any) -> Any:
    """Returns whether a whole vocabulary of 40 fits what is set up unless somebody asks."""
    from specjax.config.engine import EngineConfig
    from specjax.sampling import row_values

    if hasattr(made, "_validate_logprobs"):
        room = types.SimpleNamespace(max_logprobs=20, get_vocab_size=lambda: 40)
        return made._validate_logprobs(room)
    sizes = dict(prompt_length=1, eos_token_ids=(), seed=0, engine_config=EngineConfig())
    return row_values(made.over(40), **sizes)


def _vllm_defaults(stored: Mapping[str, Any]) -> float:
    from vllm import SamplingParams
    from vllm.config.model import ModelConfig

    folder = types.SimpleNamespace(
        generation_config="auto",
        try_get_generation_config=lambda: dict(stored),
        override_generation_config={},
    )
    return SamplingParams(**ModelConfig.get_diff_sampling_param(folder)).temperature


def _stored_settings(stored: Mapping[str, Any], answers: tuple[Any, Any, Any]) -> Row:
    def in_peer() -> str:
        from transformers import GenerationConfig

        settings = tiny_llama()._prepare_generation_config(GenerationConfig(**stored))[0]
        return "samples" if settings.do_sample else "greedy"

    def in_ours() -> str:
        from specjax.config.sampling import SamplingParams

        made = SamplingParams().filled(stored)
        return "samples" if made.temperature else "greedy"

    in_vllm = lambda: "samples" if _vllm_defaults(stored) > 0 else "greedy"
    return Row(answers, in_vllm, in_peer, in_ours)


PARAMS_ROWS = {
    "`temperature=2.5`": of_params(
        (REFUSED, 2.5, 2.5),
        lambda made: made.temperature,
        {"temperature": 2.5},
        lambda: tiny_llama()._prepare_generation_config(None, temperature=2.5)[0].temperature,
    ),
    "`temperature=0`": of_params(
        (0.0, REFUSED, 0.0),
        lambda made: made.temperature,
        {"temperature": 0.0},
        lambda: in_transformers(SHARP, temperature=0.0),
    ),
    "`n=2` at temperature 0": _greedy(answers=(REFUSED, REFUSED, 2), n=2),
    "`seed=-1`": of_params((None, None, None), lambda made: made.seed, {"seed": -1}),
    "`top_k`, not given": of_params(
        (0, 50, 0), lambda made: made.top_k, {}, lambda: transformers_default("top_k")
    ),
    "`top_k=-1`": of_params(
        (-1, REFUSED, -1),
        lambda made: made.top_k,
        {"top_k": -1},
        lambda: in_transformers(SHARP, top_k=-1),
    ),
    "`top_p=0`": of_params(
        (REFUSED, [0], REFUSED),
        lambda made: made.top_p,
        {"top_p": 0.0},
        lambda: kept(in_transformers(SHARP, top_p=0.0)),
    ),
    "`max_tokens`, not given": of_params(
        (16, 20, 128),
        lambda made: made.max_tokens,
        {},
        lambda: generated(do_sample=False, eos_token_id=None).shape[1] - 1,
    ),
    "`presence_penalty=3`": of_params(
        (REFUSED, None, 3.0), lambda made: made.presence_penalty, {"presence_penalty": 3.0}
    ),
    "`logit_bias` of 500": of_params(
        (500.0, 500.0, 500.0),
        lambda made: made.logit_bias[1],
        {"logit_bias": {1: 500.0}},
        lambda: float(in_transformers(NOTHING, sequence_bias=[[[1], 500.0]])[1]),
    ),
    "`logit_bias` of 500 to a server": Row((100.0, None, None), _bias_of_server, None, None),
    "what log-probabilities are of": Row(
        ("raw", "processed", "both"), _scores_of_vllm, _scores_of_transformers, _scores_of_specjax
    ),
    "`logprobs=-1`": of_params((-1, None, -1), lambda made: made.logprobs, {"logprobs": -1}),
    "`logprobs=-1` of 40 tokens, with no other setting": of_params(
        (REFUSED, None, REFUSED), _room_for_all, {"logprobs": -1}
    ),
    "`generation_config.json` without `do_sample`": _stored_settings(
        {"temperature": 0.6}, ("samples", "greedy", "samples")
    ),
    '`"do_sample": false` there': _stored_settings(
        {"do_sample": False}, ("samples", "greedy", "greedy")
    ),
}


def _ngram_of_vllm(text: Sequence[int]) -> list[int]:
    from vllm.v1.spec_decode import ngram_proposer

    find = ngram_proposer._find_longest_matched_ngram_and_propose_tokens
    return find(np.array(text, np.int32), 2, 2, 100, 5).tolist()


def _ngram_of_transformers(text: Sequence[int]) -> list[int]:
    import torch
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    lookup = PromptLookupCandidateGenerator(None, num_output_tokens=5, max_length=100)
    return lookup.get_candidates(torch.tensor([text]))[0][0, len(text) :].tolist()


def _ngram_of_specjax(text: Sequence[int]) -> list[int]:
    history = np.zeros((1, 16), np.int32)
    history[0, : len(text)] = text
    return np.asarray(_lookup()(history, np.array([len(text)])))[0, 0].tolist()


@functools.cache
def _lookup() -> Callable[..., Any]:
    import jax

    from pallas_kernels.ngram_match import ngram_match
    from specjax.drafters.ngram import continuations

    def drafts(history: jax.Array, length: jax.Array) -> jax.Array:
        found = ngram_match(history, length, min_match=2, max_match=2, num_matches=1)
        return continuations(history, length, found.starts, 5)

    return jax.jit(drafts)


def _ngrams(text: Sequence[int], answers: tuple[Any, Any, Any]) -> Row:
    asked = (_ngram_of_vllm, _ngram_of_transformers, _ngram_of_specjax)
    return Row(answers, *(functools.partial(ask, text) for ask in asked))


NGRAM_ROWS = {
    "n-grams: of equal matches": _ngrams(
        [1, 2, 9, 8, 7, 3, 4, 1, 2, 5, 6, 3, 4, 1, 2],
        ([9, 8, 7, 3, 4], [9, 8, 7, 3, 4], [5, 6, 3, 4, 1]),
    ),
    "n-grams: a draft that reaches the end of the text": _ngrams(
        [1, 2, 3, 1, 2], ([3, 1, 2], [3, 1, 2], [3, 1, 2, 3, 1])
    ),
}

ROWS = STEP_ROWS | PARAMS_ROWS | NGRAM_ROWS
