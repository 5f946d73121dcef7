"""From what a user names to a drafter, and what is refused before any compile."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

import specjax
from specjax.config.speculation import SpeculationConfig
from specjax.drafters.base import DrafterSpec
from specjax.drafters.spec import ModelDrafter, NgramDrafter, NoDrafter
from specjax.heads.equations.medusa import MedusaConfig
from specjax.heads.loading import LoadedDrafter, load_drafter
from specjax.heads.specs import NewestStateDrafter
from specjax.models.loading import load_model
from specjax.trees import static_shapes
from specjax.trees.expanding import Growth

GOLDENS = Path(__file__).resolve().parents[2] / "goldens"


@pytest.fixture(scope="module")
def target():
    return load_model(GOLDENS / "llama")


@pytest.mark.parametrize("kind", [str, Path])
def test_a_folder_as_text_or_path(target, kind):
    drafter = load_drafter(kind(GOLDENS / "llama"), target)
    assert drafter.has_probs
    assert drafter.name == "llama"
    assert drafter.spec == ModelDrafter(target.config)


def test_names_that_are_no_model(target):
    assert load_drafter(None, target).spec == NoDrafter()
    assert load_drafter("ngram", target).spec == NgramDrafter()
    assert not load_drafter(None, target).can_draft


def test_a_loaded_drafter_is_returned_as_it_is(target):
    for source in (target, "ngram", None):
        drafter = load_drafter(source, target)
        assert load_drafter(drafter, target) is drafter


def test_a_loaded_drafter_of_another_vocabulary_is_refused(target):
    size = target.config.vocab_size
    config = dataclasses.replace(target.config, vocab_size=size + 1)
    drafter = LoadedDrafter("other", ModelDrafter(config), target.params)
    message = f"'other' is for a vocabulary of {size + 1} tokens, and target .* has {size}"
    with pytest.raises(ValueError, match=message):
        load_drafter(drafter, target)


@dataclasses.dataclass(frozen=True)
class Head(DrafterSpec):
    says: str = "weight"

    def abstract_params(self, target, dtype):
        weights = {"weight": jax.ShapeDtypeStruct((2, 3), dtype)}
        return {} if self.says == "nothing" else {self.says: weights[self.says]}


WEIGHTS = {"weight": np.zeros((2, 3), np.float32)}


def test_weights_are_those_that_the_spec_says(target):
    for drafter in (
        LoadedDrafter("mine", Head(), WEIGHTS),
        LoadedDrafter("mine", Head("nothing"), WEIGHTS),
        LoadedDrafter("mine", DrafterSpec(), WEIGHTS),
        load_drafter("ngram", target),
        load_drafter(target, target),
    ):
        drafter.check_params(target.config, np.float32)


@pytest.mark.parametrize(
    ("drafter", "error", "message"),
    [
        (Head(), ValueError, r"drafter 'Head' are not .*: missing \[\"\['weight'\]\"\]"),
        (
            LoadedDrafter("mine", Head(), {"w": np.zeros(1)} | WEIGHTS),
            ValueError,
            r"not expected .*'w'",
        ),
        (
            LoadedDrafter("mine", Head(), {"weight": np.zeros(5)}),
            ValueError,
            r"\['weight'\] is of \(5,\), not \(2, 3\)",
        ),
        (Head("more"), TypeError, r"drafter 'Head': its abstract_params raised KeyError\('more'\)"),
        ("bare", ValueError, "'ModelDrafter' are not .* missing"),
    ],
    ids=["none", "another", "shape", "raises", "no model"],
)
def test_other_weights_are_refused_at_once(target, drafter, error, message):
    drafter = ModelDrafter(target.config) if drafter == "bare" else drafter
    with pytest.raises(error, match=message):
        specjax.Engine(target, drafter=drafter)


@pytest.mark.parametrize("source", [3, b"ngram", ["ngram"], {}])
def test_other_types_are_refused(target, source):
    with pytest.raises(TypeError, match=r"expected None, 'ngram', .*'self-int4', 'demo', a folder"):
        load_drafter(source, target)


def sources_of(name, target, config=None):
    """A drafter as it is named, and as it was loaded before."""
    return name, load_drafter(name, target, config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_lookup_matches": 3}, "prompt_lookup_matches=3 is for method 'ngram'"),
        ({"num_draft_nodes": 3}, "num_draft_nodes=3 is for trees of several n-gram"),
    ],
)
def test_what_a_model_has_no_use_for_is_refused(target, fields, message):
    for source in sources_of(target, target):
        with pytest.raises(ValueError, match=message):
            load_drafter(source, target, SpeculationConfig(**fields))


@pytest.mark.parametrize("source", ["ngram", "history", "self-int8", "model", "medusa", "own"])
def test_drafters_without_features_store_none(target, source):
    if source == "medusa":
        own = target.config
        sizes = {"target_hidden_size": own.hidden_size, "target_vocab_size": own.vocab_size}
        source = NewestStateDrafter(
            MedusaConfig(aux_layers=(own.num_layers,), most_drafts=2, **sizes)
        )
    source = {"model": target, "own": DrafterSpec()}.get(source, source)
    load_drafter(source, target, SpeculationConfig(store_features=False))
    for stored in (True, "captured"):
        with pytest.raises(ValueError, match="store_features"):
            load_drafter(source, target, SpeculationConfig(store_features=stored))


@pytest.mark.parametrize("fields", [{"speculative_token_tree": (2, 1)}, {"tree_top_k": 2}])
def test_a_tree_of_a_model_is_refused_where_there_is_none(target, fields):
    for source in sources_of("ngram", target):
        with pytest.raises(ValueError, match="the drafter is 'ngram'"):
            load_drafter(source, target, SpeculationConfig(**fields))


def test_a_call_changes_a_loaded_ngram_drafter(target):
    loaded = load_drafter(
        "ngram",
        target,
        SpeculationConfig(prompt_lookup_min=3, prompt_lookup_max=6, prompt_lookup_matches=2),
    )
    assert loaded.spec == NgramDrafter(3, 6, 2)
    change = lambda **fields: load_drafter(loaded, target, SpeculationConfig(**fields)).spec
    assert change() is loaded.spec
    assert change(verification="delta") is loaded.spec
    assert change(prompt_lookup_matches=4) == NgramDrafter(3, 6, 4)
    assert change(num_draft_nodes=9) == NgramDrafter(3, 6, 2, 9)
    assert change(prompt_lookup_min=1) == NgramDrafter(1, 6, 2)
    assert change(prompt_lookup_max=8) == NgramDrafter(3, 8, 2)
    # One bound alone moves the other out of its way.
    assert change(prompt_lookup_max=2) == NgramDrafter(2, 2, 2)
    assert change(prompt_lookup_min=7, prompt_lookup_max=7) == NgramDrafter(7, 7, 2)
    low = load_drafter("ngram", target, SpeculationConfig(prompt_lookup_min=1, prompt_lookup_max=2))
    config = SpeculationConfig(prompt_lookup_min=3)
    assert load_drafter(low, target, config).spec == NgramDrafter(3, 3)


def test_a_call_changes_a_loaded_model_drafter(target):
    grown = load_drafter(target, target, SpeculationConfig(tree_top_k=3, num_speculative_tokens=5))
    assert grown.spec.shape == Growth(5, 3, 15)
    change = lambda **fields: load_drafter(grown, target, SpeculationConfig(**fields)).spec.shape
    assert change() == grown.spec.shape
    assert change(num_draft_nodes=7) == Growth(5, 3, 7)
    assert change(tree_top_k=2, num_draft_nodes=7) == Growth(4, 2, 7)
    assert change(speculative_token_tree=(2, 1)) == static_shapes.from_widths((2, 1))


@pytest.mark.parametrize(
    ("source", "fields", "is_tree", "max_depth", "num_nodes", "tree_slots"),
    [
        (None, {}, False, None, 1, 0),
        ("ngram", {}, False, None, 4, 0),
        ("ngram", {"num_draft_nodes": 2}, False, None, 4, 0),
        ("ngram", {"prompt_lookup_matches": 2}, True, None, 7, 6),
        (
            "ngram",
            {"prompt_lookup_matches": 2, "num_draft_nodes": 5},
            True,
            None,
            6,
            5,
        ),
        ("model", {}, False, None, 4, 0),
        ("model", {"speculative_token_tree": (3, 2, 1, 1)}, True, 4, 16, 15),
        # Six nodes are fed on the way, and four are kept.
        ("model", {"tree_top_k": 3, "num_draft_nodes": 4}, True, 4, 5, 6),
    ],
)
def test_how_much_room_three_tokens_take(
    target, source, fields, is_tree, max_depth, num_nodes, tree_slots
):
    source = target if source == "model" else source
    drafter = load_drafter(source, target, SpeculationConfig(**fields))
    assert (drafter.is_tree, drafter.max_depth) == (is_tree, max_depth)
    assert drafter.num_nodes(3) == num_nodes
    assert drafter.tree_slots(3) == tree_slots


def test_a_spec_that_does_not_say_drafts_chains():
    drafter = LoadedDrafter("own", DrafterSpec())
    assert (drafter.is_tree, drafter.max_depth) == (False, None)
    assert (drafter.num_nodes(3), drafter.tree_slots(3)) == (4, 0)


class Whole(NgramDrafter):
    """Made from one number of its own: no config can be applied to its fields."""

    def __init__(self, length):
        super().__init__(length, length)


def test_a_derived_drafter_that_takes_no_fields_says_so(target):
    with pytest.raises(TypeError, match=r"Whole\.configured\(config\) raised .* by name, or def"):
        load_drafter(Whole(3), target)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_model_len": 9},
        {"prompt_lookup_min": 3, "num_draft_nodes": 3},
        {"prompt_lookup_max": 9},
        {"prompt_lookup_matches": 2},
        {"corpus_tokens": 512},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_drafter_of_ones_own_takes_no_settings_of_others(target, settings):
    with pytest.raises(ValueError, match=f"'DrafterSpec', which takes none of .*{[*settings][-1]}"):
        load_drafter(DrafterSpec(), target, SpeculationConfig(**settings))
    same = SpeculationConfig(num_speculative_tokens=2, policy="fixed", max_drafts_per_step=3)
    load_drafter(DrafterSpec(), target, same)
    load_drafter(None, target, SpeculationConfig(**settings))
