"""What a conversation is rendered with: templates by name, and the arguments of transformers."""

import enum
import json
import warnings
from pathlib import Path
from typing import Any, Literal

import pytest
import tokenizers
from tokenizers import models

from specjax.text.tokenization import Tokenizer
from specjax.text.tool_schemas import schema_of

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
STRIPS = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}</s>{% endfor %}"
LOOPS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "now", "description": "The time."}}
DOCUMENT = {"title": "One", "text": "First."}
ASKED = [{"role": "user", "content": "Name a colour."}]
BEGUN = [*ASKED, {"role": "assistant", "content": "I would say"}]


def _tokenizer(template=CHATML) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    return Tokenizer(backend, special_tokens={"bos_token": "<s>"}, chat_template=template)


def _from(folder, config, **files) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    _tokenizer().backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"} | config))
    for name, text in files.items():
        path = folder / f"{name}.jinja"
        if name != "chat_template":
            path = folder / "additional_chat_templates" / path.name
            path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return Tokenizer.from_folder(folder)


NAMED = {
    "default": "plain",
    "tool_use": "with {{ tools | tojson }}",
    "rag": "{{ documents[0].text }}",
}
AS_LIST = {"chat_template": [{"name": name, "template": text} for name, text in NAMED.items()]}


@pytest.mark.parametrize("form", ["list", "files", "mapping"])
def test_templates_by_name(tmp_path, form):
    """transformers 5.24: tools take "tool_use" where it is there; any by its name, or another's
    text."""
    if form == "list":
        tokenizer = _from(tmp_path, AS_LIST)
    elif form == "files":  # beside which the list says the same
        more = {name: NAMED[name] for name in ("tool_use", "rag")}
        tokenizer = _from(tmp_path, AS_LIST, chat_template=NAMED["default"], **more)
    else:
        tokenizer = _tokenizer(NAMED)
    assert tokenizer.chat_template == NAMED
    assert tokenizer.render_chat(ASKED) == "plain"
    assert tokenizer.render_chat(ASKED, tools=[TOOL]) == f"with {json.dumps([TOOL])}"
    assert tokenizer.render_chat(ASKED, documents=[DOCUMENT], chat_template="rag") == "First."
    assert tokenizer.render_chat(ASKED, chat_template="{{ bos_token }}") == "<s>"
    with pytest.warns(UserWarning, match="has no place for tools"):
        assert tokenizer.render_chat(ASKED, tools=[TOOL], chat_template="default") == "plain"
    with pytest.raises(ValueError, match=r"'tools' is neither the name .*default, rag, tool_use"):
        tokenizer.render_chat(ASKED, chat_template="tools")


def test_files_of_templates_win_over_the_config(tmp_path):
    config = {"chat_template": "of the config"}
    assert _from(tmp_path, config).render_chat(ASKED) == "of the config"
    with pytest.warns(
        match=r"tokenizer_config.json holds .* \(default\), since .*/rag.jinja is there"
    ):
        tokenizer = _from(tmp_path, config, rag="only {{ bos_token }}")
    assert tokenizer.chat_template == {"rag": "only {{ bos_token }}"}
    assert tokenizer.render_chat(ASKED, chat_template="rag") == "only <s>"
    with pytest.raises(ValueError, match="templates named rag, and none is the default"):
        tokenizer.render_chat(ASKED)
    with pytest.warns(
        match=r"tokenizer_config.json holds .* \(default\), since chat_template.jinja is there"
    ):
        tokenizer = _from(tmp_path, config, chat_template="file")
    assert tokenizer.chat_template["default"] == "file"


def test_chat_templates_in_two_files(tmp_path):
    """Silent where files agree or say null; else the first is used, and the other named."""
    legacy = tmp_path / "chat_template.json"
    legacy.write_text(json.dumps({"chat_template": None}))
    assert _from(tmp_path, {"chat_template": "a"}).chat_template == "a"
    legacy.write_text(json.dumps({"chat_template": "a"}))
    assert _from(tmp_path, {"chat_template": "a"}).chat_template == "a"
    with pytest.warns(match=r"tokenizer_config.json holds .* since chat_template.json is there"):
        assert _from(tmp_path, AS_LIST).chat_template == "a"
    with pytest.warns(match=r"/chat_template.json holds .* since chat_template.jinja is there"):
        assert _from(tmp_path, {"chat_template": "b"}, chat_template="b").chat_template == "b"
    legacy.unlink()
    (tmp_path / "chat_template.jinja").unlink()
    assert _from(tmp_path, {"chat_template": NAMED}).chat_template == NAMED
    twice = {"chat_template": [{"name": "rag", "template": text} for text in "aab"]}
    with pytest.warns(match=r"tokenizer_config.json has two chat templates 'rag'; the last"):
        assert _from(tmp_path, twice).chat_template == {"rag": "b"}


def test_a_template_in_a_file_that_is_not_used(tmp_path):
    """It is said where something is lost, and is never in the way."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _from(tmp_path, {"chat_template": "a\n"}, chat_template="a").chat_template == "a"
        found = _from(tmp_path, {"chat_template": "a"}, chat_template="a", rag="r").chat_template
        assert found == {"default": "a", "rag": "r"}
    with pytest.warns(match=r"tokenizer_config.json holds .* \(tool_use, rag\), since"):
        _from(tmp_path / "more", AS_LIST, chat_template="plain")
    with pytest.warns(match=r"/chat_template.jinja holds .* since .*/default.jinja is there"):
        assert _from(tmp_path, {}, chat_template="a", default="b").chat_template["default"] == "b"
    (tmp_path / "additional_chat_templates" / "default.jinja").unlink()
    with pytest.warns(match=r"is 5, expected .* It is not used, since .*jinja is there"):
        _from(tmp_path, {"chat_template": 5}, chat_template="a")
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.warns(match=r"chat_template.json is not JSON.* It is not used"):
        _from(tmp_path, {}, chat_template="a")


# Rows of docs/two-places.md, with the tests of each.
ROWS = {
    "a chat template": (
        test_files_of_templates_win_over_the_config,
        test_chat_templates_in_two_files,
    ),
    "chat_template.json": (test_chat_templates_in_two_files,),
    "chat templates by name": (test_templates_by_name, test_chat_templates_in_two_files),
    "files of chat templates by name": (
        test_templates_by_name,
        test_files_of_templates_win_over_the_config,
        test_a_template_in_a_file_that_is_not_used,
    ),
}


def test_the_table_has_these_rows():
    docs = Path(__file__).parents[3] / "docs" / "two-places.md"
    table = docs.read_text().partition("## Tokenizers")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    assert sorted(row for row in rows if "template" in row) == sorted(ROWS)


@pytest.mark.parametrize(
    "template", [[5], [{"name": ["default"]}], [{"name": "default"}], [{"template": "d"}], {"a": 1}]
)
def test_a_list_of_templates_names_each(tmp_path, template):
    with pytest.raises(ValueError, match=r"a chat template in .*name and template; fetch"):
        _from(tmp_path, {"chat_template": template})


def test_a_template_file_that_leads_elsewhere(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    _from(folder, {}, rag="r")
    (tmp_path / "outside.jinja").write_text("o")
    (folder / "additional_chat_templates" / "b.jinja").symlink_to(tmp_path / "outside.jinja")
    with pytest.raises(ValueError, match="symbolic link out of its folder"):
        Tokenizer.from_folder(folder)


def test_whether_a_reply_begins():
    render = _tokenizer().render_chat
    begins = "<|im_end|>\n<|im_start|>assistant\n"
    assert render(ASKED).endswith(begins)
    assert render(ASKED, add_generation_prompt=True).endswith(begins)
    assert render(ASKED, add_generation_prompt=False).endswith("colour.<|im_end|>\n")


def test_the_final_message_is_continued():
    parts = [*ASKED, {"role": "assistant", "content": [{"type": "text", "text": "I say "}]}]
    thinks = [*ASKED, {"role": "assistant", "content": "", "reasoning": "so far"}]
    reasons = (
        "{% for m in messages %}{{ m.content }}<think>{{ m.reasoning_content }}</think>{% endfor %}"
    )
    spaced = [{"role": "assistant", "content": "  I say  "}]
    for template, messages, arguments, right in (
        (CHATML, BEGUN, {}, "<|im_start|>assistant\nI would say"),
        (CHATML, BEGUN, {"add_generation_prompt": False}, "<|im_start|>assistant\nI would say"),
        (CHATML, parts, {}, "<|im_start|>assistant\nI say "),
        (LOOPS, parts, {}, "<I say "),
        (CHATML, spaced, {}, "assistant\n  I say  "),
        (STRIPS, spaced, {}, "[assistant]I say"),
        (reasons, thinks, {"continue_final_message": "reasoning_content"}, "<think>so far"),
        (reasons, thinks, {"continue_final_message": "reasoning"}, "<think>so far"),
    ):
        given = {"continue_final_message": True} | arguments
        text = _tokenizer(template).render_chat(messages, **given)
        assert text.endswith(right), (template, messages, text)
    assert "CONTINUED" not in str(BEGUN)


@pytest.mark.parametrize(
    ("template", "messages", "arguments", "message"),
    [
        (CHATML, BEGUN, {"add_generation_prompt": True}, "exclude each other"),
        (CHATML, BEGUN, {"continue_final_message": "thinking"}, "has no text 'thinking'"),
        (CHATML, [{"role": "user", "content": None}], {}, "has no text 'content'"),
        ("{{ bos_token }}", BEGUN, {}, "the template does not write it"),
        ("{{ messages[0].content }}", BEGUN, {}, "does not write the final message as it is"),
        (STRIPS.replace("trim", "upper"), BEGUN, {}, "does not write the final message as it is"),
    ],
)
def test_what_cannot_be_continued_is_refused(template, messages, arguments, message):
    with pytest.raises(ValueError, match=message):
        _tokenizer(template).render_chat(messages, **{"continue_final_message": True} | arguments)


def test_arguments_that_have_no_effect_are_refused_by_name():
    tokenizer = _tokenizer()
    refused = {
        "padding": True, "truncation": True, "max_length": 5, "return_tensors": "np",
        "return_dict": True, "tokenizer_kwargs": {"a": 1}, "add_special_tokens": True,
        "sanitize_control_tokens": True, "return_assistant_tokens_mask": True,
        "chat_template_kwargs": {"a": 1}, "chat_template_content_format": "openai",
    }  # fmt: skip
    for name, value in refused.items():
        for method in (tokenizer.render_chat, tokenizer.encode_chat):
            with pytest.raises(ValueError, match=f"^{name}=.* is not available"):
                method(ASKED, **{name: value})
    nothing = dict.fromkeys(refused, None) | {"padding": False, "return_dict": False}
    assert tokenizer.render_chat(ASKED, **nothing) == tokenizer.render_chat(ASKED)
    with pytest.raises(ValueError, match="encode_chat returns ids; render_chat"):
        tokenizer.encode_chat(ASKED, tokenize=False)
    with pytest.raises(ValueError, match="render_chat returns text; encode_chat"):
        tokenizer.render_chat(ASKED, tokenize=True)
    assert tokenizer.encode_chat(ASKED, tokenize=True)


def test_any_other_argument_is_a_variable_of_the_template():
    source = "{{ bos_token }}{{ enable_thinking }}{{ missing is defined }}{{ tools is none }}"
    render = _tokenizer(source).render_chat
    assert render(ASKED, enable_thinking=False) == "<s>FalseFalseTrue"
    assert render(ASKED, enable_thinking=1, bos_token="<b>") == "<b>1FalseTrue"


def test_what_is_no_conversation_is_refused():
    render = _tokenizer().render_chat
    for messages, message in (
        ([], "there are no messages"),
        ("hi", "messages must be a list, got str"),
        ({"role": "user"}, "messages must be a list, got dict"),
        (["hi"], "a message must be a dict with role and content, got 'hi'"),
    ):
        with pytest.raises(ValueError, match=message):
            render(messages)
    with pytest.raises(ValueError, match="tools must be a list, got dict"):
        render(ASKED, tools=TOOL)
    with pytest.raises(ValueError, match="tools holds 'now'; expected JSON schemas or functions"):
        render(ASKED, tools=["now"])
    with pytest.raises(ValueError, match="documents must be a list"):
        render(ASKED, documents="text")


def test_messages_as_other_libraries_give_them():
    """transformers 5.24: None is left out, and reasoning has the names that templates read."""
    source = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    given = {"role": "assistant", "content": "c", "tool_calls": None, "reasoning": "r"}
    expected = {"thinking": "r", "role": "assistant", "content": "c", "reasoning": "r"}
    text = _tokenizer(source).render_chat([given])
    assert json.loads(text) == expected | {"reasoning_content": "r"}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (LOOPS, "<a><b>"),
        (LOOPS.replace("m.content", "m['content']"), "<a><b>"),
        ("{% set c = messages[0].content %}{% for part in c %}{{ part.text }}{% endfor %}", "ab"),
        ("{% for part in messages[0].content[:1] %}{{ part.text }}{% endfor %}", "a"),
        ("{{ messages[0].content | map(attribute='text') | join }}", "ab"),
        ("{{ messages[0].content }}", "a\nb"),
        ("{% if messages[0].content is string %}{{ messages[0].content }}{% endif %}", "a\nb"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "a\nb"),
    ],
)
def test_content_in_parts_is_passed_or_joined(template, text):
    """Joined by lines where no loop takes it, as vLLM does (0.33)."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert _tokenizer(template).render_chat([{"role": "user", "content": parts}]) == text


@pytest.mark.parametrize("kind", ["image_url", "image", "input_audio", "video", "input_file"])
def test_images_are_refused_by_name(kind):
    parts = [{"type": "text", "text": "a"}, {"type": kind, kind: "data:"}]
    for template in (LOOPS, CHATML):
        with pytest.raises(ValueError, match=f"a part of type '{kind}', and models here read text"):
            _tokenizer(template).render_chat([{"role": "user", "content": parts}])
    with pytest.raises(ValueError, match="takes text, and a message has parts without text"):
        _tokenizer().render_chat([{"role": "user", "content": [{"type": "card"}]}])


def test_what_the_template_has_no_place_for_is_said():
    render = _tokenizer().render_chat
    with pytest.warns(UserWarning, match="no place for documents, which has no effect; name"):
        render(ASKED, documents=[DOCUMENT])
    with pytest.warns(UserWarning, match="no place for enable_thinking, which") as told:
        render(ASKED, enable_thinking=False)
    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match="no place for enable, which has no effect; name") as told:
        _tokenizer("{{ enable_thinking }}").encode_chat(ASKED, enable=False)
    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match=r"\(did you mean 'add_generation_prompt'\?\)"):
        render(ASKED, add_generation_promt=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        render(ASKED, documents=[], tools=None, padding=False, tokenizer_kwargs={}, more=None)
        of_all = _tokenizer("{{ tools }}{{ documents }}{{ enable_thinking }}").render_chat
        of_all(ASKED, tools=[TOOL], documents=[{}], enable_thinking=False)


class Unit(enum.Enum):
    CELSIUS = "c"
    KELVIN = "k"


def weather(
    city: str,
    days: int | None = None,
    unit: Unit = Unit.CELSIUS,
    detail: Literal["low", 2] = "low",
    places: list[dict[str, float]] = (),
    other: int | list[str] = 0,
) -> dict[str, Any]:
    """Returns the weather,
    of some days.

    Args:
      city: Its name, which
        goes on here.
      days (int, optional): How many.
      unit: Of the temperature.
      detail: How much: a word.
      places: More of them.
      other: Of the list. (choices: ["a ", 1])

    Returns:
      What is measured.

    Raises:
      ValueError: never.
    """
    return {}


def test_a_function_is_described_as_transformers_does():
    """The value is that of get_json_schema, transformers 5.24."""
    properties = {
        "city": {"type": "string", "description": "Its name, which goes on here."},
        "days": {"type": "integer", "nullable": True, "description": "How many."},
        "unit": {"type": "string", "enum": ["c", "k"], "description": "Of the temperature."},
        "detail": {
            "type": ["string", "integer"],
            "enum": ["low", 2],
            "description": "How much: a word.",
        },
        "places": {
            "type": "array",
            "items": {"type": "object", "additionalProperties": {"type": "number"}},
            "description": "More of them.",
        },
        "other": {
            "anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "string"}}],
            "enum": ["a", 1],
            "description": "Of the list.",
        },
    }
    schema = {
        "name": "weather",
        "description": "Returns the weather,\nof some days.",
        "parameters": {"type": "object", "properties": properties, "required": ["city"]},
        "return": {
            "type": "object",
            "additionalProperties": {},
            "description": "What is measured.",
        },
    }
    assert schema_of(weather) == {"type": "function", "function": schema}
    text = _tokenizer("{{ tools | tojson }}").render_chat(ASKED, tools=[weather])
    assert json.loads(text) == [schema_of(weather)]


def test_a_function_that_cannot_be_described_is_refused():
    def no_hint(a):
        """Does it.

        Args:
          a: An a.
        """

    def no_line(a: int):
        """Does it."""

    def no_text(): ...

    def no_json(a: Tokenizer):
        """Does it.

        Args:
          a: An a.
        """

    for function, message in (
        (no_hint, "'no_hint' has no type hint or no line under 'Args:' for 'a'"),
        (no_line, "'no_line' has no type hint or no line"),
        (no_text, "'no_text' has no docstring"),
        (no_json, "'no_json' has the type hint .*which has no JSON"),
    ):
        with pytest.raises(ValueError, match=message):
            schema_of(function)
