"""The comparison with tunix's sampler, on a model that takes no time."""

from __future__ import annotations

import json
import warnings

import jax
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # tunix uses what newer jax and flax deprecate
    pytest.importorskip("tunix")
    from specjax.bench import tunix_sampler

pytestmark = [
    pytest.mark.tunix,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SHAPE = tunix_sampler.Shape(
    num_layers=2,
    vocab_size=200,
    embed_dim=64,
    hidden_dim=96,
    num_heads=4,
    head_dim=16,
    num_kv_heads=2,
    prompt_tokens=40,
    new_tokens=48,
    batches=(2,),
)


def test_figures(monkeypatch):
    monkeypatch.setattr(tunix_sampler, "STEADY_CALLS", 1)
    jax.config.update("jax_numpy_rank_promotion", "allow")  # which tunix needs
    try:
        figures = tunix_sampler.run(SHAPE, 2, lambda what: None)
    finally:
        jax.config.update("jax_numpy_rank_promotion", "raise")
    figures = json.loads(json.dumps(figures))
    assert figures["environment"]["tunix"]
    plain, repeating = figures["plain"]["2"], figures["repeating"]
    for part in (plain, repeating):
        for each in part.values():
            if isinstance(each, dict):
                assert each["calls_with_equal_tokens"] == each["calls_compared"] > 2
                assert len(each["seconds"]) == 2
                assert each["tokens_per_s"] > 0
    for drafter in tunix_sampler.DRAFTERS:
        assert repeating[drafter]["num_accepted"] > 0
        assert repeating[drafter]["num_steps"] < repeating["specjax"]["num_steps"]
    text = tunix_sampler.as_text(figures)
    assert "plain, batch 2" in text
    assert "times tunix" in text


def test_text_of_the_copying_model_walks_around_a_cycle():
    weights = tunix_sampler.Weights(SHAPE, is_copying=True)
    (prompt,) = weights.prompts(0, 1)
    words = prompt.split()
    period = tunix_sampler.PERIOD
    assert len(set(words)) == period
    assert words[period:] == words[:-period]
    (other,) = weights.prompts(1, 1)
    assert not set(words) & set(other.split())
    assert weights.prompts(0, 1) == [prompt]
