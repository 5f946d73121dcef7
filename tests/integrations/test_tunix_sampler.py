"""The comparison with tunix's sampler, on a model that takes no time."""

from __future__ import annotations

import json
import pathlib
import warnings

import jax
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # tunix uses what newer jax and flax deprecate
    tunix = pytest.importorskip("tunix")
    from benchmarks import tunix_sampler

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
    others = set(SHAPE.cache_tokens)
    for part in (plain, repeating):
        assert set(part["specjax"]["over"]) == others
        for name in others:
            assert "over" not in part[name]
            pairs = zip(part[name]["seconds"], part["specjax"]["seconds"], strict=True)
            low, high = sorted(its / own for its, own in pairs)
            over = part["specjax"]["over"][name]
            assert low * 0.9 < over["ratio"] < high * 1.1  # seconds are rounded
    text = tunix_sampler.as_text(figures)
    assert "plain, batch 2" in text
    for name in others:
        assert f" times {name} (" in text


def test_caches_have_the_sizes_that_tunix_chooses():
    shape = tunix_sampler.Shape()
    assert [*shape.cache_tokens.values()] == [448, 192, 1024]
    weights = tunix_sampler.Weights(SHAPE, is_copying=False)
    contenders = tunix_sampler.tunix_contenders(weights, 1)
    sizes = {name: it._sampler.cache_config.cache_size for name, it in contenders.items()}
    assert sizes == SHAPE.cache_tokens
    assert len(set(sizes.values())) == 3
    own = tunix_sampler.Specjax(weights, 1).rollout
    assert own._max_context == SHAPE.kv_cache_size
    # The rule is tunix's own: where a later version has another, so must we.
    command = pathlib.Path(tunix.__file__).parent / "cli" / "grpo_main.py"
    rule = "kv_cache_size = max_prompt + max_response + 256"
    assert rule in command.read_text()
    assert tunix_sampler.SPARE_TOKENS == 256


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
