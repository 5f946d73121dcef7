"""Encodes text that continues a text: without the space that some tokenizers put before a text."""

from __future__ import annotations

import json
from typing import Any

import tokenizers

_LISTS = ("normalizers", "pretokenizers")
# Whitespace is one space, none at the end, as pre-tokenizers leave it that split at whitespace.
_WHITESPACE = [
    {"type": "Replace", "pattern": {"Regex": r"\s+\z"}, "content": ""},
    {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
]


def puts_space_before(backend: tokenizers.Tokenizer) -> str | None:
    """Returns "first" or "always" of a tokenizer that puts a space before a text, else None.

    "always": also before text that follows an added token.
    """
    pipeline = [_state(backend.normalizer), _state(backend.pre_tokenizer)]
    if _bare(*pipeline) == dict(zip(("normalizer", "pre_tokenizer"), pipeline, strict=True)):
        return None
    return "first" if '"prepend_scheme": "first"' in json.dumps(pipeline) else "always"


class Continuing:
    """A tokenizer of text that follows other text.

    The space before a text is a normalizer's (Prepend), or a pre-tokenizer's (Metaspace, or
    ByteLevel with add_prefix_space). The space that these put after an added token within the
    text stays, as in one text with what is before.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = self._bare = backend
        pipeline = {
            "normalizer": _state(backend.normalizer),
            "pre_tokenizer": _state(backend.pre_tokenizer),
        }
        bare = _bare(**pipeline)
        if bare != pipeline:
            document = json.loads(backend.to_str())
            self._bare = tokenizers.Tokenizer.from_str(json.dumps({**document, **bare}))
            unknown = _unknown_id(document["model"])
            self._added = {each["id"] for each in document["added_tokens"]} - {unknown}

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without those that a post-processor adds."""
        first, rest = self._bare.encode(text, add_special_tokens=False).ids, []
        if self._bare is not self._backend and (end := self._first_added(first)) < len(first):
            rest = self._backend.encode(text, add_special_tokens=False).ids
            first, rest = first[:end], rest[self._first_added(rest) :]
        return [*first, *rest]

    def _first_added(self, ids: list[int]) -> int:
        """Returns the place of the first added token, the number of ids if there is none."""
        return next((place for place, i in enumerate(ids) if i in self._added), len(ids))


def _state(component: Any) -> Any:
    """Returns a component of a tokenizer as tokenizer.json has it."""
    return None if component is None else json.loads(component.__getstate__())


def _bare(normalizer: Any, pre_tokenizer: Any) -> dict[str, Any]:
    """Returns the same two without the space that they put before a text."""
    normalizer = _without_prefix(normalizer)
    stages = (pre_tokenizer or {}).get("pretokenizers", ())
    splits = [stage for stage in stages if stage["type"] in ("Whitespace", "WhitespaceSplit")]
    if splits and any(_without_prefix(stage) != stage for stage in stages):
        # Only the space put before each word says where words begin (T5): keep the text's own.
        words = [stage for stage in stages if stage not in splits]
        pre_tokenizer = {**pre_tokenizer, "pretokenizers": words}
        own = [] if normalizer is None else [normalizer]
        normalizer = {"type": "Sequence", "normalizers": [*own, *_WHITESPACE]}
    pre_tokenizer = _without_prefix(pre_tokenizer)
    return {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}


def _without_prefix(stage: Any) -> Any:
    """Returns a stage of a pipeline, None for one that does nothing but put a space before."""
    if stage is None or stage["type"] == "Prepend":
        return None
    if stage["type"] == "Metaspace":
        return {**stage, "prepend_scheme": "never"}
    if stage["type"] == "ByteLevel":
        return {**stage, "add_prefix_space": False}
    for key in _LISTS:
        if key in stage:
            kept = [_without_prefix(each) for each in stage[key]]
            return {**stage, key: [each for each in kept if each is not None]}
    return stage


def _unknown_id(model: dict[str, Any]) -> int | None:
    """Returns the id of the token that stands for unknown text, which is no added token there."""
    if model["type"] == "Unigram":
        return model["unk_id"]
    return model["vocab"].get(model.get("unk_token"))
