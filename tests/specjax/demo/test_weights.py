"""The embedded weights as files: complete, small, and what the manifest says."""

import json

import pytest
from tokenizers import Tokenizer

from benchmarks.demo.checkpoint_files import from_tensors, read_safetensors
from benchmarks.demo.pair import DRAFT, END_OF_TEXT, END_OF_TEXT_ID, TARGET
from specjax.demo import DRAFT_FOLDER, TARGET_FOLDER, WEIGHTS_FOLDER, corpus

FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
PAIR = [(TARGET_FOLDER, TARGET), (DRAFT_FOLDER, DRAFT)]


def test_at_most_20_mb_together():
    total = sum(path.stat().st_size for path in WEIGHTS_FOLDER.rglob("*") if path.is_file())
    assert total <= 20_000_000


@pytest.mark.parametrize("folder, config", PAIR)
def test_files_agree_with_the_shapes(folder, config):
    content = json.loads((folder / "config.json").read_text())
    assert content["num_hidden_layers"] == config.num_layers
    assert content["hidden_size"] == config.hidden_size
    assert content["vocab_size"] == config.vocab_size
    tensors = read_safetensors(folder / "model.safetensors")
    stored = [name for name in tensors if not name.endswith("_scale")]
    assert len(stored) == 2 + 9 * config.num_layers
    params = from_tensors(tensors, config.num_layers)
    assert params["embed_tokens"].shape == (config.vocab_size, config.hidden_size)


def test_one_tokenizer_for_both():
    assert (TARGET_FOLDER / "tokenizer.json").read_bytes() == (
        DRAFT_FOLDER / "tokenizer.json"
    ).read_bytes()
    tokenizer = Tokenizer.from_file(str(TARGET_FOLDER / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == TARGET.vocab_size
    assert tokenizer.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID
    text = "def fibonacci(n):\n    return n if n < 2 else 'ü'\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_manifest_tells_the_split():
    manifest = json.loads((WEIGHTS_FOLDER / "manifest.json").read_text())
    assert manifest["licence"] == "PSF-2.0"
    assert manifest["python_version"]
    held_out = [path for path in manifest["sha256"] if corpus.is_held_out(path)]
    assert manifest["held_out"] == held_out
    assert all(len(digest) == 64 for digest in manifest["sha256"].values())


def test_logs_show_that_the_loss_fell():
    for stage in ("draft_text", "target_text", "draft_distilled"):
        rows = (WEIGHTS_FOLDER / f"{stage}_loss.csv").read_text().splitlines()[1:]
        losses = [float(row.split(",")[1]) for row in rows]
        assert losses[-1] < losses[0]
