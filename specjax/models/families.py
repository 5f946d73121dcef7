"""The registry of model families: specjax's own, and those that a program registers."""

from __future__ import annotations

from specjax.models import gpt2, llama
from specjax.models.base import Family, ModelConfig

_OWN = llama.FAMILY, gpt2.FAMILY
_FUNCTIONS = "parse", "sources", "axes", "init", "forward", "logits", "work", "embed"
FAMILIES: dict[str, Family] = {family.name: family for family in _OWN}


def register(family: Family) -> None:
    """Adds a family in this process, so that its models can be loaded and run.

    Registering the same object again does nothing. See docs/adding-a-model.md.

    Raises:
      TypeError: it is no Family, or a member that must be a function is none.
      ValueError: its name or one of its model types belongs to another family. Names cannot be
        reused, because steps compiled for the other family would run under the name.
    """
    if not isinstance(family, Family):
        raise TypeError(
            f"family is {family!r:.100}; expected an instance of specjax.models.Family."
        )
    for name in _FUNCTIONS:
        if not callable(member := getattr(family, name)):
            raise TypeError(
                f"{name}={member!r:.100} of family {family.name!r:.100} is no function."
            )
    if FAMILIES.get(family.name) is family:
        return
    if family.name in FAMILIES:
        raise ValueError(f"a family is named {family.name!r} already; give this one another name.")
    for model_type in family.model_types:
        if (other := family_of_type(model_type)) is not None:
            raise ValueError(
                f"{model_type=} is read by the family {other.name!r} already; leave it out of "
                f"the model_types of {family.name!r}."
            )
    FAMILIES[family.name] = family


def family_of(config: ModelConfig) -> Family:
    """Returns the family that runs a config.

    Raises:
      ValueError: no family is named `config.architecture`.
    """
    family = FAMILIES.get(config.architecture)
    if family is None:
        raise ValueError(
            f"architecture={config.architecture!r:.100} is none of {', '.join(FAMILIES)}; "
            "register its family with specjax.models.register."
        )
    return family


def is_own(config: ModelConfig) -> bool:
    """Returns whether specjax's own code runs a config, so that its source digest covers it."""
    return any(family_of(config) is family for family in _OWN)


def family_of_type(model_type: str) -> Family | None:
    """Returns the family that reads a model_type of config.json, or None."""
    found = (family for family in FAMILIES.values() if model_type in family.model_types)
    return next(found, None)


def class_names() -> dict[str, str]:
    """Returns every supported model_type, with its class name in `architectures`."""
    return {
        model_type: class_name
        for family in FAMILIES.values()
        for model_type, class_name in family.model_types.items()
    }
