"""Where hardly a draft is accepted, one warning says what is likely wrong."""

import dataclasses
import re
import warnings

import jax
import pytest
from head_equations import TARGET, VOCAB

import specjax
from specjax.api.acceptance_alarm import LEAST_STEPS, AcceptanceAlarm
from specjax.config.sampling import SamplingParams
from specjax.drafters.spec import HybridDrafter, ModelDrafter, NgramDrafter
from specjax.drafters.token_set import TokenSet
from specjax.engine.request import AcceptanceCounts
from specjax.heads.equations import eagle
from specjax.heads.equations.eagle import EagleConfig
from specjax.heads.equations.eagle3 import Eagle3Config
from specjax.heads.equations.medusa import MedusaConfig
from specjax.heads.loading import LoadedDrafter
from specjax.heads.specs import EagleDrafter, NewestStateDrafter

HEAD = EagleConfig(
    layers=dataclasses.replace(TARGET.config, num_layers=1),
    target_vocab_size=VOCAB,
    aux_layers=(TARGET.config.num_layers,),
)


def drafter(spec=None, notes=()):
    return LoadedDrafter("head", spec or EagleDrafter(HEAD), {"w": jax.numpy.ones(3)}, notes)


def counts(num_steps, num_accepted):
    total = AcceptanceCounts()
    for step in range(num_steps):
        total.add(2, int(step < num_accepted))
    return total


def warned(of, *seen, verification="seeded"):
    alarm = AcceptanceAlarm(of, verification)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for one in seen:
            alarm.look(one)
    return [str(each.message) for each in found]


@pytest.mark.parametrize(
    ("num_steps", "num_accepted", "is_warned"),
    [
        (LEAST_STEPS, 0, True),
        (LEAST_STEPS - 1, 0, False),
        (LEAST_STEPS, 1, False),
        (100, 2, True),
        (100, 3, False),
        (0, 0, False),
    ],
)
def test_what_is_an_alarm(num_steps, num_accepted, is_warned):
    found = warned(drafter(), counts(num_steps, num_accepted))
    assert len(found) == is_warned
    if found:
        assert "hardly a draft of 'head' was accepted: in 2% of the steps" in found[0]


def test_it_says_so_once_and_how_the_files_were_understood():
    found = warned(drafter(notes=("reads left", "drops right")), *2 * [counts(30, 0)])
    assert len(found) == 1
    assert "Likely it was trained for another target" in found[0]
    assert found[0].endswith("As it was loaded it reads left; drops right.")


def test_who_is_not_judged():
    nothing = counts(100, 0)
    assert not warned(LoadedDrafter("ngram", NgramDrafter()), nothing)
    assert not warned(drafter(), nothing, verification="synthetic")


def test_every_drafter_with_weights_has_its_faults():
    model = ModelDrafter(TARGET.config)
    assert model.likely_faults == HybridDrafter(model).likely_faults
    some = dataclasses.replace(model, said=TokenSet.of(jax.numpy.arange(VOCAB) > 3))
    assert f"the {VOCAB - 4} tokens that both" in some.likely_faults[-1]


SIZES = {
    "target_hidden_size": TARGET.config.hidden_size,
    "target_vocab_size": VOCAB,
    "aux_layers": (TARGET.config.num_layers,),
    "most_drafts": 3,
}
SEVERAL = {"layers": HEAD.layers, "target_vocab_size": VOCAB, "aux_layers": (0, 2, 1)}


@pytest.mark.parametrize(
    ("spec", "last"),
    [
        (NewestStateDrafter(MedusaConfig(**SIZES)), "another version of this one"),
        (EagleDrafter(HEAD), "another version of this one"),
        (EagleDrafter(dataclasses.replace(HEAD, is_mtp=True)), "in the other order"),
        (EagleDrafter(Eagle3Config(**SEVERAL, target_hidden_size=32)), r"layers 0, 2, 1: .*aux"),
    ],
    ids=["Medusa", "EAGLE", "MTP", "EAGLE-3"],
)
def test_heads_name_what_is_theirs(spec, last):
    assert "another target" in spec.likely_faults[0]
    assert re.search(last, spec.likely_faults[-1])


@pytest.mark.full
def test_a_head_of_other_weights_is_noticed():
    """In whole calls, and in an engine by the next request, or at the end."""
    params = eagle.init(jax.random.key(5), HEAD, std=1.0)
    head = LoadedDrafter("head", EagleDrafter(HEAD), params)
    sampling = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    arguments = {
        "drafter": head,
        "speculative_config": {"policy": "fixed", "num_speculative_tokens": 2},
        "engine": specjax.EngineConfig(page_size=8, max_rows=2, max_context=64),
    }
    with pytest.warns(UserWarning, match="of 'head' was accepted") as found:
        specjax.generate(TARGET, [[1, 2], [3]], sampling=sampling, **arguments)
    assert found[-1].filename == __file__
    with specjax.Engine(TARGET, **arguments) as engine:
        for prompt in ([1, 2], [3]):
            engine.add(prompt, sampling)
        while engine.has_work:
            engine.step()
        with pytest.warns(UserWarning, match="of 'head' was accepted"):
            engine.add([5], sampling)
