"""What a config says beside a drafter that a call names: another head, more drafts, n-grams."""

import dataclasses

import jax
import pytest
from helpers import tiny_llama

import specjax
from specjax.drafters.spec import HybridDrafter
from specjax.heads.equations import medusa
from specjax.heads.equations.dflash import DFlashConfig
from specjax.heads.equations.eagle import EagleConfig
from specjax.heads.equations.eagle3 import Eagle3Config
from specjax.heads.equations.medusa import MedusaConfig
from specjax.heads.specs import DFlashDrafter, EagleDrafter, NewestStateDrafter
from specjax.models.base import before_final_norm

TARGET = tiny_llama(0)
OWN = dataclasses.replace(TARGET.config, num_layers=1, architecture="llama")
WIDTH, VOCAB, DEPTH = OWN.hidden_size, OWN.vocab_size, TARGET.config.num_layers
OF_TARGET = {"target_vocab_size": VOCAB, "target_hidden_size": WIDTH}
HEADS = {
    "eagle": EagleDrafter(EagleConfig(layers=OWN, target_vocab_size=VOCAB, aux_layers=(DEPTH,))),
    "mtp": EagleDrafter(
        EagleConfig(
            layers=OWN,
            target_vocab_size=VOCAB,
            aux_layers=(before_final_norm(DEPTH),),
            is_mtp=True,
        )
    ),
    "eagle3": EagleDrafter(Eagle3Config(layers=OWN, aux_layers=(0, 0, 1), **OF_TARGET)),
    "dflash": DFlashDrafter(
        DFlashConfig(
            layers=OWN,
            aux_layers=(0, 1),
            block_size=4,
            mask_token_id=5,
            causal_layers=(False,),
            **OF_TARGET,
        )
    ),
    "medusa": NewestStateDrafter(MedusaConfig(aux_layers=(DEPTH,), most_drafts=2, **OF_TARGET)),
}
OTHER = {"method": "eagle", "model": "path/to/eagle", "num_speculative_tokens": 2}


CALLS = {
    "generate": lambda **given: specjax.generate(TARGET, [[1, 2]], **given),
    "Engine": lambda **given: specjax.Engine(TARGET, **given),
    "build_decoder": lambda **given: specjax.build_decoder(TARGET, **given),
}


@pytest.mark.parametrize("call", CALLS)
def test_another_drafter_than_the_method_names_is_refused(call):
    message = r"the drafter is 'ngram', and .* method='eagle' of 'path/to/eagle'"
    with pytest.raises(ValueError, match=message):
        CALLS[call](drafter="ngram", speculative_config=OTHER)


@pytest.mark.parametrize("call", CALLS)
def test_rules_by_draft_distributions_are_refused_under_invariant_numerics(call):
    """By an engine and a decoder where they are made."""
    given = {"drafter": TARGET, "engine": {"numerics": "invariant"}}
    with pytest.raises(ValueError, match=r"numerics='invariant' .* verification='block'"):
        CALLS[call](verification="block", **given)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_goes_with_its_own_method_alone(name):
    source = specjax.LoadedDrafter("head", HEADS[name])
    for method in HEADS:
        config = specjax.SpeculationConfig(method=method, model="elsewhere")
        if method == name:
            assert specjax.load_drafter(source, TARGET, config) == source
            continue
        with pytest.raises(ValueError, match=f"method='{method}'"):
            specjax.load_drafter(source, TARGET, config)


@pytest.mark.full
def test_plain_decoding_goes_with_any_method():
    out = specjax.generate(TARGET, [[1, 2]], drafter="none", speculative_config=OTHER)
    assert out.stats.acceptance.num_drafted == 0


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("fields", [{"prompt_lookup_max": 7}, {"prompt_lookup_min": 3}])
def test_bounds_of_ngrams_are_refused_by_every_head(name, fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        HEADS[name].configured(specjax.SpeculationConfig(**fields))


@pytest.mark.parametrize("name", HEADS)
def test_beside_history_the_lower_bound_is_of_its_matches(name):
    config = specjax.SpeculationConfig(corpus_tokens=512, prompt_lookup_min=3)
    found = HEADS[name].configured(config)
    assert found == HybridDrafter(HEADS[name], 512, 3)
    assert found.configured(specjax.SpeculationConfig(prompt_lookup_min=4)).min_match == 4


@pytest.mark.parametrize("name", HEADS)
def test_beside_history_no_match_is_too_long(name):
    config = specjax.SpeculationConfig(corpus_tokens=512, prompt_lookup_max=7)
    with pytest.raises(ValueError, match=r"prompt_lookup_max=7 .* leave it out"):
        HEADS[name].configured(config)
    with pytest.raises(ValueError, match=r"prompt_lookup_max=7 .* leave it out"):
        HybridDrafter(HEADS[name], 512, 3).configured(config)


@pytest.mark.full
def test_k_above_what_is_ever_drafted_is_said_once():
    config = HEADS["medusa"].config
    head = specjax.LoadedDrafter("heads", HEADS["medusa"], medusa.init(jax.random.key(0), config))
    generate = lambda k: specjax.generate(
        TARGET,
        [[1, 2], [3]],
        drafter=head,
        num_speculative_tokens=k,
        sampling=specjax.SamplingParams(max_tokens=3),
    )
    generate(2)
    generate(None)  # nobody asked for the default
    with pytest.warns(UserWarning, match="=5, and 'heads' drafts at most 2 tokens") as said:
        generate(5)
    assert [warning.filename for warning in said] == [__file__]
