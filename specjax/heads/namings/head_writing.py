"""What the writers of heads over a target share: namings, layers, and vocabularies in files.

A kind of head is published in several namings: keys of config.json and names of tensors. A wrong
reading of a head is silent, so that a naming which cannot say a flag of a config refuses it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.heads.namings.head_files import NESTED, TARGET_IDS
from specjax.models import unparsing, weights
from specjax.models.base import Json, ModelConfig, Params
from specjax.models.weight_writing import Tensor, of_array, tensors_of
from specjax.models.weights import Source

AUTO = "auto"
# Of `speculators`, whose files these are as it writes them.
SPECULATORS_VERSION = "0.9.0"
# Conditions of `Naming.given`.
AS_WIDE_AS_TARGET: Mapping[str, Any] = {
    "target_hidden_size": lambda config: config.target_hidden_size == config.hidden_size
}
# `attention_bias` is of all four matrices or none.
BIASES_OF_ALL: Mapping[str, Any] = {
    "layers.qkv_bias": lambda config: config.layers.qkv_bias == config.layers.o_bias
}


class OfTarget(NamedTuple):
    """What is known of the target of a head; nothing has to be.

    Attributes:
      config: None where the target is not known.
      name: its name on the hub, or its folder.
      classes: `architectures` of its config.json.
    """

    config: ModelConfig | None = None
    name: str | None = None
    classes: tuple[str, ...] = ()


class Naming(NamedTuple):
    """A way in which a kind of head is published.

    Attributes:
      raw: (config, target) -> config.json, without the dtype.
      leaves: config -> a tree with a Weight at each leaf, of the names in the file.
      readers: of the folder, beside specjax.
      given: what it cannot say otherwise: by fields of the config, "layers.x" among them, the value
        that its readers take as given, or a function of the config that says whether they do.
      unsaid: (config, target) -> what else it cannot say.
      weights_file: its name where that is not the usual one.
      shapes: of tensors that are stored in another shape than their leaf has.
      always_maps: whether d2t and t2d are there for a whole vocabulary, too.
      nested: the key of the part of config.json that describes the layers, None: the top.
    """

    raw: Callable[[Any, OfTarget], Json]
    leaves: Callable[[Any], Any]
    readers: tuple[str, ...]
    given: Mapping[str, Any] = {}
    unsaid: Callable[[Any, OfTarget], list[str]] = lambda config, target: []
    weights_file: str | None = None
    shapes: Callable[[Any], dict[str, tuple[int, ...]]] = lambda config: {}
    always_maps: bool = False
    nested: str | None = None

    def refusals(self, config: Any, target: OfTarget) -> list[str]:
        """Returns what it cannot say of a config and its target, as "norm_output=True"."""
        found = []
        for name, given in self.given.items():
            value = operator.attrgetter(name)(config)
            if not (given(config) if callable(given) else value == given):
                found.append(f"{name}={value!r:.80}")
        return found + self.unsaid(config, target)


class Kind(NamedTuple):
    """A kind of head that can be written.

    Attributes:
      method: as `SpeculationConfig.method` names it.
      title: for cards and messages.
      namings: by name; "auto" takes the first that can say a head.
    """

    method: str
    title: str
    namings: dict[str, Naming]


def choose(kind: Kind, config: Any, target: OfTarget, naming: str) -> str:
    """Returns the name of the naming that a head is written in.

    Raises:
      ValueError: the kind has no such naming, or it cannot say the config.
    """
    names = [*kind.namings]
    if naming not in (AUTO, *names):
        raise ValueError(
            f"{naming=!r:.100} is no naming of {kind.title} heads; expected "
            f"{_either([AUTO, *names])}."
        )
    refused = {name: each.refusals(config, target) for name, each in kind.namings.items()}
    able = [name for name in names if not refused[name]]
    if naming != AUTO and naming not in able:
        others = (
            f"naming={_either(able)} can" if able else "no naming of its kind can; use save_orbax"
        )
        raise ValueError(
            f"{naming=} cannot say {', '.join(refused[naming])} of this {kind.title} head; "
            f"{others}."
        )
    if not able:
        each = "; ".join(f"{name}: {', '.join(what)}" for name, what in refused.items())
        raise ValueError(
            f"no naming of {kind.title} heads can say this one ({each}); use save_orbax, which "
            "saves any."
        )
    return able[0] if naming == AUTO else naming


def _either(names: Sequence[str]) -> str:
    *first, last = map(repr, names)
    return f"{', '.join(first)} or {last}" if first else last


def layers_json(config: Any, model_type: str) -> Json:
    """Returns what config.json says of a head's layers, under the keys of transformers 4 and 5.

    Args:
      model_type: whose layers they are: "llama", or "qwen3", which has norms of queries and keys.
    """
    own, vocab = config.layers, config.target_vocab_size
    raw = unparsing.llama_skeleton(dataclasses.replace(own, family=model_type, vocab_size=vocab))
    stretched = raw["rope_scaling"] or {"rope_type": "default"}
    raw["rope_parameters"] = {"rope_theta": own.rope.theta} | stretched
    # They are the target's, which nobody asks a head for.
    return {"model_type": model_type} | raw | {"bos_token_id": None, "eos_token_id": None}


def speculators_json(
    algorithm: str, class_name: str, num_drafts: int, target: OfTarget, own: Json, layers: Json
) -> Json:
    """Returns a config.json of `speculators`.

    Args:
      num_drafts: how many tokens a server drafts where it is not told.
      own: what is said of the head beside its layers.
      layers: of `layers_json`.
    """
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": num_drafts,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    of_drafting = {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [greedy],
        "verifier": {"name_or_path": target.name, "architectures": [*target.classes]},
    }
    return {
        "architectures": [class_name],
        "speculators_model_type": algorithm,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": of_drafting,
        **own,
        "tie_word_embeddings": False,
        NESTED: layers,
    }


def tensors_to_write(naming: Naming, config: Any, params: Params) -> dict[str, Tensor]:
    """Returns the tensors of a head's file by name.

    Args:
      params: of the head, as `abstract_params` of its spec says.
    """
    floats = {name: leaf for name, leaf in params.items() if name != "target_ids"}
    tensors = tensors_of(weights.sources_of(naming.leaves(config)), floats)
    for name, shape in naming.shapes(config).items():
        tensors[name] = _reshaped(tensors[name], shape)
    if config.maps_vocabulary or (naming.always_maps and config.has_head):
        maps = vocabulary_maps(config, params.get("target_ids"))
        tensors |= {name: of_array(name, table) for name, table in maps.items()}
    return tensors


def _reshaped(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    ((part, read),) = tensor.parts
    return Tensor(shape, tensor.dtype, [(Source(part.name, shape), lambda: read().reshape(shape))])


def vocabulary_maps(config: Any, target_ids: Any) -> dict[str, np.ndarray]:
    """Returns d2t i64[vocab_size], what is added to the head's number of a token to have the
    target's, and t2d bool[target_vocab_size], whether the head can say a token of the target.

    Args:
      target_ids: i32[vocab_size], the target's numbers; None: they are the head's.
    """
    own = np.arange(config.vocab_size, dtype=np.int64)
    ids = own if target_ids is None else np.asarray(jax.device_get(target_ids), np.int64)
    said = np.zeros(config.target_vocab_size, bool)
    said[ids[(ids >= 0) & (ids < len(said))]] = True  # what is beyond is refused when it is read
    return {TARGET_IDS: ids - own, "t2d": said}
