"""The tokenizer wrapper and chat templates."""

import json
from unittest import mock

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from specjax.text import tokenizer_json
from specjax.text.tokenization import Tokenizer

Panic = type(tokenizer_json.PANIC, (BaseException,), {})

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HELLO = [{"role": "user", "content": "hi"}]


def _backend() -> tokenizers.Tokenizer:
    """One token per byte, and a post-processor that writes <s> first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|im_start|>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


@pytest.fixture
def folder(tmp_path):
    _backend().save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def _with_template(template, **special_tokens) -> Tokenizer:
    return Tokenizer(_backend(), special_tokens=special_tokens, chat_template=template)


def test_a_folder_without_a_tokenizer_has_none(tmp_path):
    assert Tokenizer.from_folder(tmp_path) is None


def test_encode_adds_special_tokens_and_decode_skips_them(folder):
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode("a \u4f60")
    assert ids[0] == tokenizer.bos_token_id == 256
    assert len(ids) == 1 + 2 + 3
    assert tokenizer.decode(ids) == "a \u4f60"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>a \u4f60"


def test_special_tokens_are_strings_or_objects(folder):
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.eos_token_id == 257
    assert set(tokenizer.special_texts) == {256, 257, 258}
    assert tokenizer.vocab_size == len(tokenizer.vocabulary()) == 259


def test_special_tokens_map_is_read_when_the_config_is_silent(folder):
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == (None, "</s>")
    assert tokenizer.bos_token_id is None


def test_the_config_wins_over_special_tokens_map(folder):
    others = {"eos_token": "<|im_start|>", "pad_token": "<s>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(others))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token == "</s>"
    assert tokenizer.special_tokens["pad_token"] == "<s>"  # of which the config is silent


def test_padding_and_truncation_of_the_file_are_switched_off(folder):
    backend = _backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    assert len(tokenizer.encode("a")) == 2
    assert len(tokenizer.encode("abcdefg")) == 8


def test_a_chat_is_encoded_without_further_special_tokens():
    tokenizer = _with_template(CHATML, eos_token="</s>")
    expected = "<|im_start|>user\nhi</s><|im_start|>assistant\n"
    ids = tokenizer.encode_chat(HELLO)
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected
    assert ids[0] == tokenizer.token_id("<|im_start|>")


def test_add_generation_prompt_can_be_switched_off():
    tokenizer = _with_template(CHATML, eos_token="</s>")
    text = tokenizer.render_chat(HELLO, add_generation_prompt=False)
    assert text == "<|im_start|>user\nhi</s>"


def test_no_template_says_what_to_do():
    with pytest.raises(ValueError, match="has no chat template; add"):
        _with_template(None).encode_chat(HELLO)


def test_where_the_template_is_found(folder):
    render = lambda: Tokenizer.from_folder(folder).render_chat(HELLO)
    named = [
        {"name": "tool_use", "template": "t"},
        {"name": "default", "template": "d"},
    ]
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": named}))
    assert render() == "d"
    config.write_text(json.dumps({"chat_template": "from config"}))
    assert render() == "from config"
    (folder / "chat_template.json").write_text('{"chat_template": "from json"}')
    config.write_text("{}")
    assert render() == "from json"
    (folder / "chat_template.json").unlink()
    (folder / "chat_template.jinja").write_text("from jinja")
    assert render() == "from jinja"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer_config.json", '{"eos_token": 5}', "eos_token in .* is 5, expected"),
        ("tokenizer_config.json", '{"bos_token": {"content": [1]}}', "bos_token in"),
        ("tokenizer_config.json", '{"chat_template": 5}', "a chat template in .* is 5, expected"),
        ("tokenizer_config.json", '{"a": ', "is not JSON"),
        ("chat_template.json", '{"chat_template": ["a"], "chat_template": 1}', "twice"),
        ("chat_template.jinja", b"\xff\xfe", "is not UTF-8"),
        ("chat_template.jinja", "a" * 10**6, "the most that is read"),
        ("special_tokens_map.json", "[]", "holds a list"),
    ],
)
def test_odd_files_beside_the_tokenizer(folder, name, text, message):
    content = text if isinstance(text, bytes) else text.encode()
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("method", ["encode", "decode"])
def test_a_panic_of_the_library_is_an_error(method):
    """It is no Exception in Python, and would end a server. tokenizers 0.23 panics on some texts
    and ids where a file's stages do not fit each other."""
    backend = mock.MagicMock()
    use = {
        "encode": lambda: Tokenizer(backend).encode("a"),
        "decode": lambda: Tokenizer(backend).decode([1]),
    }
    for error, expected in (
        (Panic, pytest.raises(ValueError, match=rf"cannot {method} th.*at line 1")),
        (OverflowError, pytest.raises(ValueError, match=rf"cannot {method} th.*at line 1")),
        (KeyboardInterrupt, pytest.raises(KeyboardInterrupt)),
        (TypeError, pytest.raises(TypeError)),
    ):
        getattr(backend, method).side_effect = error("at line 1")
        with expected:
            use[method]()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_corrupt_file_is_named(folder, name):
    (folder / name).write_text('{"half": ')
    with pytest.raises(ValueError, match=name):
        Tokenizer.from_folder(folder)


def test_half_of_a_surrogate_pair_is_no_text(folder):
    with pytest.raises(ValueError, match="half of a surrogate pair at 1"):
        Tokenizer.from_folder(folder).encode("a\ud800b")
