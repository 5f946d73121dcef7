"""Chat templates here and in transformers: equal texts, and a difference is seen."""

import sys
import types

import pytest

from tools import chat_templates

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STRICT = "{{ raise_exception('roles') if messages | length > 1 else messages[0].content | trim }}"
TOOLS = "{% for t in tools %}{{ t | tojson(indent=2) }}{% endfor %}{{ messages[-1].content }}"
SOURCES = {"chatml": CHATML, "strict": STRICT, "tools": TOOLS}


@pytest.mark.reference
def test_texts_are_those_of_transformers():
    counts, differ = chat_templates.compare(SOURCES)
    assert differ == []
    assert counts["equal"] > 15
    assert counts["errors in both"] > 0


def test_a_difference_is_shown(monkeypatch, tmp_path, capsys):
    wrong = lambda source, messages, arguments: {"a": "b", "c": "c"}[source]
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    monkeypatch.setattr(chat_templates, "there", wrong)
    monkeypatch.setattr(chat_templates, "here", lambda source, *_: source)
    for name in "ac":
        (tmp_path / f"{name}.jinja").write_text(name)
    assert chat_templates.main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    cases = len(chat_templates.CASES)
    assert len(lines) == cases + 1
    assert "a.jinja, one message: 'a' here, 'b' there" in lines[0]
    assert lines[-1].startswith("2 templates")
    assert f"'equal': {cases + 1}" in lines[-1]
    assert "'differ on purpose': 1" in lines[-1]
