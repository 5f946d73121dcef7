"""A generation as one JSON document."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specjax.cli.prompts import messages_of

if TYPE_CHECKING:
    from specjax.api.results import Completion, Generation

_OUTPUT_FIELDS = (
    "prompt_index",
    "sample_index",
    "text",
    "token_ids",
    "finish_reason",
    "stop_reason",
    "error",
    "seed",
    "lossy",
)


def render(generation: Generation, about: Mapping[str, Any]) -> str:
    """Returns the document: `about`, then `outputs` in the order of the prompts, and `stats`."""
    outputs = [_output(completion) for completion in generation]
    document = {**about, "outputs": outputs, "stats": generation.stats.to_dict()}
    return json.dumps(plain(document), ensure_ascii=False, indent=2, allow_nan=False)


def lines(generation: Generation, prompts: Sequence[Any]) -> str:
    """Returns a line of JSON per completion, with the prompt as it was given."""
    found = []
    for completion in generation:
        prompt = prompts[completion.prompt_index]
        messages = messages_of(prompt)
        given = {"prompt": prompt} if messages is None else {"messages": messages}
        own = plain(given | _output(completion))
        found.append(json.dumps(own, ensure_ascii=False, allow_nan=False) + "\n")
    return "".join(found)


def _output(completion: Completion) -> dict[str, Any]:
    counts = completion.acceptance
    output = {name: getattr(completion, name) for name in _OUTPUT_FIELDS}
    if completion.logprobs is not None:
        output["logprobs"] = [dataclasses.asdict(entry) for entry in completion.logprobs]
    if completion.self_check is not None:
        output["self_check"] = completion.self_check.to_dict()
    output["num_prompt_tokens"] = len(completion.prompt_token_ids)
    output["num_steps"] = counts.num_steps
    output["num_drafted"] = counts.num_drafted
    output["num_accepted"] = counts.num_accepted
    return output


def plain(value: Any) -> Any:
    """Returns a value as JSON has it: null for numbers that it lacks, as the logarithm of 0."""
    if hasattr(value, "tolist"):  # an array, or a number of one
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
