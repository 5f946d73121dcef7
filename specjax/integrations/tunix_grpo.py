"""tunix's command for GRPO with specjax's engine: `python -m specjax.integrations.tunix_grpo`.

A configuration of tunix names its engine by a word, and knows three. This command takes the
arguments of `python -m tunix.cli.grpo_main`, and beside them specjax_config.NAME=VALUE for those of
SpecjaxRollout.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

from specjax.integrations.tunix import SpecjaxRollout

try:
    from absl import app
    from tunix.cli import grpo_main  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(
        "specjax.integrations.tunix_grpo needs google-tunix: pip install google-tunix."
    ) from error

_OWN = "specjax_config."


def pipeline_with(engine: Any) -> type:
    """Returns tunix's pipeline of a configuration, with this engine whatever it names."""

    class Pipeline(grpo_main.GrpoPipeline):
        def create_cluster_config(self, **options: Any) -> Any:
            config = super().create_cluster_config(**options)
            return dataclasses.replace(config, rollout_engine=engine)

    return Pipeline


def engine_of(arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """Returns the engine that specjax_config.NAME=VALUE arguments ask for, and all other arguments.

    Values are JSON where they can be, else text: specjax_config.drafter=ngram,
    specjax_config.engine.max_rows=64, specjax_config.drafter=null.

    Raises:
      ValueError: an argument has no value.
    """
    options: dict[str, Any] = {}
    rest = []
    for argument in arguments:
        if not argument.startswith(_OWN):
            rest.append(argument)
            continue
        name, is_set, value = argument.removeprefix(_OWN).partition("=")
        if not is_set:
            raise ValueError(f"{argument!r} has no value; write {argument}=VALUE.")
        *groups, last = name.split(".")
        place = functools.reduce(lambda group, key: group.setdefault(key, {}), groups, options)
        place[last] = _value(value)
    return functools.partial(SpecjaxRollout, **options), rest


def main(arguments: Sequence[str], **options: Any) -> None:
    """Runs tunix's command; the first argument is the program's name."""
    engine, rest = engine_of(arguments)
    # tunix's main makes whatever stands under this name in its module.
    theirs = grpo_main.GrpoPipeline
    grpo_main.GrpoPipeline = pipeline_with(engine)
    try:
        grpo_main.main(rest, **options)
    finally:
        grpo_main.GrpoPipeline = theirs


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


if __name__ == "__main__":
    app.run(main)
