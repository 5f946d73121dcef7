"""Renders conversations by chat templates, here and in transformers, and shows where texts differ.

    pip install --no-deps --target templates trl==1.16.0 axolotl==0.19.0
    python -m tools.chat_templates templates/

takes every *.jinja below the folders (the extra `reference` has transformers). A template may
refuse a conversation: an error on both sides is agreement.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specjax.text import chat_template

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
USER = {"role": "user", "content": "Name a colour."}
REPLY = {"role": "assistant", "content": " Blue, I would say. "}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"type": "function", "function": {"name": "now", "arguments": {"place": "Oslo"}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "now", "content": "12:00"}
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
TOOL = {"type": "function", "function": {"name": "now", "description": "T.", "parameters": SCHEMA}}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Name"}]}
THOUGHT = REPLY | {"reasoning_content": "The sky is blue."}
CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one message": ([USER], {}),
    "without a reply begun": ([USER], {"add_generation_prompt": False}),
    "a system message": ([SYSTEM, USER, REPLY, USER], {}),
    "a reply to continue": ([USER, REPLY], {"continue_final_message": True}),
    "tools": ([USER], {"tools": [TOOL]}),
    "a tool called": ([USER, CALLS, RESULT], {"tools": [TOOL]}),
    "documents": ([USER], {"documents": [{"title": "One", "text": "First."}]}),
    "thinking": ([USER], {"enable_thinking": True}),
    "no thinking": ([USER], {"enable_thinking": False}),
    "a thought": ([USER, THOUGHT, USER], {}),
    "roles that do not alternate": ([USER, USER], {}),
}
# Here parts are joined where a template takes text; transformers writes the list itself.
ON_PURPOSE = {"content in parts": ([PARTS], {})}


def here(source: str, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
    named = {"tools", "documents", "add_generation_prompt", "continue_final_message"}
    own = {name: arguments[name] for name in named & arguments.keys()}
    variables = {name: value for name, value in arguments.items() if name not in named}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of variables that the template lacks
        return chat_template.render(source, messages, variables, special_tokens=SPECIAL, **own)


def there(source: str, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template  # pyright: ignore

    begins = not arguments.get("continue_final_message")
    arguments = {"add_generation_prompt": begins} | SPECIAL | arguments
    return render_jinja_template([messages], chat_template=source, **arguments)[0][0]


def text_of(render: Callable[..., str], *arguments: Any) -> str | None:
    """Returns a rendering, None where it fails."""
    with contextlib.suppress(Exception):  # a template may raise anything in transformers
        return render(*arguments)
    return None


def compare(sources: dict[str, str]) -> tuple[collections.Counter[str], list[str]]:
    """Returns how many renderings were equal, failed in both, or differ; and names of the last."""
    counts: collections.Counter[str] = collections.Counter()
    differ = []
    for name, source in sources.items():
        for case, (messages, arguments) in (CASES | ON_PURPOSE).items():
            ours, theirs = (text_of(how, source, messages, arguments) for how in (here, there))
            is_same = "equal" if ours is not None else "errors in both"
            kind = "differ on purpose" if case in ON_PURPOSE else "differ"
            counts[is_same if ours == theirs else kind] += 1
            if ours != theirs and kind == "differ":
                differ.append(f"{name}, {case}: {ours!r:.200} here, {theirs!r:.200} there")
    return counts, differ


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.chat_templates")
    parser.add_argument("folders", type=Path, nargs="+")
    paths = [
        path
        for folder in parser.parse_args(argv).folders
        for path in sorted(folder.rglob("*.jinja"))
    ]
    sources = {path.read_text(encoding="utf-8"): str(path) for path in paths}  # each text once
    importlib.import_module("transformers")  # whose absence is no error of a template
    counts, differ = compare({path: text for text, path in sources.items()})
    print("\n".join(differ))
    print(f"{len(sources)} templates, {dict(counts)}")
    return 1 if differ or not sources else 0


if __name__ == "__main__":
    raise SystemExit(main())
