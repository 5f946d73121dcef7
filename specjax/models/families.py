"""The families of models that can run: specjax's own, and those that a program registers."""

from __future__ import annotations

from specjax.models import gpt2, llama
from specjax.models.base import Family, ModelConfig

_OWN = llama.FAMILY, gpt2.FAMILY
FAMILIES: dict[str, Family] = {family.name: family for family in _OWN}


def register(family: Family) -> None:
    """Makes a family known, in this process, to `load_model` and to whatever runs its configs.

    Registering the same object again does nothing. See docs/adding-a-model.md.

    Raises:
      ValueError: its name or one of its model types belongs to another family. What was
        compiled for that one would go on running under the name; choose another.
    """
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
      ValueError: there is none of the name that `config.architecture` says.
    """
    family = FAMILIES.get(config.architecture)
    if family is None:
        raise ValueError(
            f"architecture={config.architecture!r:.100} is none of {', '.join(FAMILIES)}; "
            "register its family with specjax.models.register."
        )
    return family


def is_own(config: ModelConfig) -> bool:
    """Returns whether specjax's own code runs a config: its version then says what it computes."""
    return any(family_of(config) is family for family in _OWN)


def family_of_type(model_type: str) -> Family | None:
    """Returns the family that reads a model_type of config.json, None where there is none."""
    found = (family for family in FAMILIES.values() if model_type in family.model_types)
    return next(found, None)


def class_names() -> dict[str, str]:
    """Returns every model_type that is read, and the class that `architectures` names with it."""
    return {
        model_type: class_name
        for family in FAMILIES.values()
        for model_type, class_name in family.model_types.items()
    }
