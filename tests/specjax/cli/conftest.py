"""A tiny random model with a tokenizer of whole words, as folders."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers

GOLDEN = Path(__file__).resolve().parents[2] / "goldens" / "llama"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A golden checkpoint; its tokens are the words w0, w1, ..."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(GOLDEN, folder)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    vocabulary = {f"w{index}": index for index in range(size)}
    words = tokenizers.models.WordLevel(vocabulary, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }} {% endfor %}w9"
    )
    return folder


@pytest.fixture(scope="session")
def untokenized_folder() -> Path:
    return GOLDEN
