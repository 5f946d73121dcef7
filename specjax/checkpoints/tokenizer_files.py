"""Writes a tokenizer as the files that `Tokenizer.from_folder` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specjax.text.added_tokens import ADDED, SETTINGS, SPECIAL
from specjax.text.template_files import LEGACY, MORE_TEMPLATES, TEMPLATE
from specjax.text.tokenization import Tokenizer

TOKENIZER = "tokenizer.json"
_OTHER_FORMS = "tokenizer.model", "vocab.json", "merges.txt"
# As publishers name them; all that is there is of the same tokenizer.
FILES = TOKENIZER, SETTINGS, TEMPLATE, LEGACY, SPECIAL, ADDED, *_OTHER_FORMS


def texts_of(tokenizer: Tokenizer | None, max_positions: int | None = None) -> dict[str, str]:
    """Returns the contents of a tokenizer's files by name; none of no tokenizer."""
    if tokenizer is None:
        return {}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **tokenizer.special_tokens,
    }
    if max_positions is not None:
        settings["model_max_length"] = max_positions
    template = tokenizer.chat_template
    if template is not None and not isinstance(template, str):
        settings["chat_template"] = [{"name": k, "template": t} for k, t in template.items()]
    texts = {
        TOKENIZER: tokenizer.backend.to_str(),
        SETTINGS: json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
    }
    if isinstance(template, str):
        texts[TEMPLATE] = template
    return texts


def published_files(tokenizer: Tokenizer | None, folder: str | None) -> list[Path]:
    """Returns the files of a tokenizer in the folder that it was loaded from; none if the folder
    holds another one by now."""
    if tokenizer is None or folder is None:
        return []
    try:
        found = Tokenizer.from_folder(folder)
    except (OSError, ValueError):
        return []
    if found is None or _parts(found) != _parts(tokenizer):
        return []
    files = [Path(folder) / name for name in FILES]
    files += sorted((Path(folder) / MORE_TEMPLATES).glob("*.jinja"))
    return [path for path in files if path.is_file()]


def _parts(tokenizer: Tokenizer) -> tuple[Any, ...]:
    return tokenizer.backend.to_str(), tokenizer.special_tokens, tokenizer.chat_template
