"""Results as a person sees them at a prompt of Python: short, with what matters."""

import dataclasses
import pickle

import pytest
from helpers import tiny_llama

from specjax.api.results import Chunk, Completion, Generation, GenerationStats
from specjax.engine.metrics import BurstRecord
from specjax.engine.request import AcceptanceCounts
from specjax.heads.loading import load_drafter

MOST = 300  # characters


def completion(**changes):
    fields = dict(
        prompt_index=0,
        sample_index=1,
        text="word " * 1000,
        token_ids=list(range(1000)),
        finish_reason="stop",
        error=None,
        logprobs=None,
        seed=1,
        acceptance=AcceptanceCounts(),
        pieces=[],
        prompt_token_ids=[1] * 1000,
        stop_reason="END",
    )
    return Completion(**fields | changes)


def stats():
    counts = AcceptanceCounts()
    counts.add(4, 3)
    return GenerationStats(
        num_prompts=1,
        num_prompt_tokens=3,
        num_output_tokens=100,
        acceptance=counts,
        run_s=0.5,
        compile_s=2.0,
        time_to_first_token_s=0.1,
        num_speculative_tokens=4,
        drafter="demo",
        verification="seeded",
    )


def test_a_completion_is_one_line():
    shown = repr(completion())
    assert len(shown) < MOST
    assert "prompt 0, sample 1: 1000 tokens, 'stop' by 'END', 'word word" in shown
    failed = repr(completion(error="why", finish_reason="error", stop_reason=None))
    assert failed == "Completion(prompt 0, sample 1: 'error', 'why')"


def test_a_generation_shows_its_first_completions():
    shown = repr(Generation([completion()] * 7, stats()))
    assert shown.count("Completion(") == 5
    assert "... 2 more" in shown
    assert "100 tokens, 0.5 s (200 tokens/s)" in shown
    assert "mean acceptance length 4.00, acceptance rate 0.75" in shown


def test_what_each_text_has_is_said_to_be_of_a_text():
    out = Generation([completion()], stats())
    with pytest.raises(AttributeError, match=r"each text has its own: out\[0\].text"):
        _ = out.text
    with pytest.raises(AttributeError, match=r"^'Generation' object has no attribute 'txt'$"):
        _ = out.txt
    assert pickle.loads(pickle.dumps(out)).completions == out.completions


def burst(depth, reason, why=""):
    figures = dict.fromkeys((field.name for field in dataclasses.fields(BurstRecord)), 0)
    own = {"num_speculative_tokens": depth, "reason": reason, "why": why}
    return BurstRecord(**figures | own)


def test_statistics_say_which_k_and_why():
    plain = [burst(0, "goodput", "a step with K = 4 takes long"), burst(0, "goodput", "newer")]
    cases = {
        "K = 0 in 2 of 2 bursts: plain decoding is faster here (newer)": plain,
        "K = 4 in 2 of 3 bursts: drafting is faster here; K = 0 in 1 of 3 bursts: measured, "
        "to compare": [burst(0, "probe"), burst(4, "goodput"), burst(4, "goodput")],
        "K = 0 in 3 of 3 bursts: the drafter failed": [
            burst(0, "goodput"),
            *[burst(0, "drafter off")] * 2,
        ],
        "K = 2 in 1 of 1 bursts: the policy is 'fixed'": [burst(2, "fixed")],
        "K = 2 in 1 of 1 bursts: of one's own": [burst(2, "of one's own")],
        "": [],
    }
    for said, records in cases.items():
        told = dataclasses.replace(stats(), decisions=tuple(records))
        assert told.why == said
        assert repr(told).endswith(f"acceptance rate 0.75. {said})" if said else "0.75)")
    alone = dataclasses.replace(stats(), drafter="none", decisions=tuple(plain))
    assert alone.why == ""


def test_a_chunk_is_one_line():
    chunk = Chunk(0, 0, "text", [1], [], "stop", completion=completion())
    assert repr(chunk) == "Chunk(prompt 0, sample 0: 1 token, 'text', 'stop')"


def test_models_and_drafters_show_no_weights():
    model = tiny_llama(0)
    assert repr(model) == (
        "Model('tiny-llama-0', llama, 19.4k parameters, float32, 2 layers, vocabulary 61, "
        "context 512, no tokenizer)"
    )
    drafter = load_drafter(dataclasses.replace(model, name="draft"), model)
    assert repr(drafter) == ("LoadedDrafter('draft', ModelDrafter, 19.4k parameters, float32)")
    assert repr(load_drafter("ngram", model)) == "LoadedDrafter('ngram', NgramDrafter)"
