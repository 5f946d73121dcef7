"""`specjax inspect`: models, draft models and heads, without their weights."""

import json

import numpy as np
import pytest
from head_folders import random_tensors, write
from helpers import save_llama, tiny_llama

from specjax.cli.main import main
from specjax.heads.equations import eagle, eagle3, medusa
from specjax.heads.equations.eagle import MTP_PREFIX, EagleConfig
from specjax.heads.equations.eagle3 import Eagle3Config
from specjax.heads.equations.medusa import MedusaConfig

WIDTH, VOCAB, LAYERS = 32, 64, 2


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "target"
    folder.mkdir()
    model = tiny_llama(0, vocab_size=VOCAB, hidden_size=WIDTH, num_layers=LAYERS)
    save_llama(folder, model)
    return folder, model.config


def found(capsys, *arguments):
    assert main(["inspect", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments):
    assert main(["inspect", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def eagle_folder(path, target, **raw):
    own = EagleConfig(
        layers=tiny_llama(0, vocab_size=VOCAB, hidden_size=WIDTH, num_layers=1).config,
        target_vocab_size=VOCAB,
        aux_layers=(LAYERS,),
    )
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": own.layers.intermediate_size,
        "num_attention_heads": own.layers.num_heads,
        "num_key_value_heads": own.layers.num_kv_heads,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
    } | raw
    return write(path, raw, random_tensors(eagle.weights_of(own)))


def test_a_model(capsys, target):
    folder, config = target
    assert main(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "kind                       language model\n" in text
    assert "heads of keys and values   2\n" in text
    assert "tokenizer                  no\n" in text
    assert "bytes                      0.1 MB\n" in text
    figures = found(capsys, folder)
    assert figures["layers"] == config.num_layers
    assert figures["kv_numbers_per_token"] == 2 * LAYERS * config.num_kv_heads * config.head_dim
    assert (
        figures["bytes"]
        == 4
        * tiny_llama(0, vocab_size=VOCAB, hidden_size=WIDTH, num_layers=LAYERS).num_parameters()
    )


def test_a_draft_model_and_its_target(capsys):
    assert main(["inspect", "demo-draft", "--target", "demo"]) == 0
    assert "tokens that it drafts      4,096 of the target's 4,096\n" in capsys.readouterr().out
    figures = found(capsys, "demo-draft", "--target", "demo")
    assert figures["tokenizer"] is True
    assert figures["drafts_tokens"] == figures["of_target_tokens"] == figures["vocabulary"]


def test_a_model_of_another_size_without_a_tokenizer(capsys, target):
    assert "has no tokenizer" in refused(capsys, target[0], "--target", "demo")


def test_a_head(capsys, target, tmp_path):
    folder = eagle_folder(tmp_path, target)
    alone = found(capsys, folder)
    assert alone["method"] == "eagle"
    assert alone["tensors"] == 9
    assert "name its target" in alone["notes"][0]
    assert "target" not in alone
    figures = found(capsys, folder, "--target", target[0])
    assert figures["captures"] == [LAYERS]
    assert figures["target"] == "target"
    assert figures["notes"] == ["reads the last hidden state of the target, after the final norm"]
    own = target[1]
    assert figures["kv_numbers_per_token"] == 2 * own.num_kv_heads * own.head_dim


def test_a_head_over_masks(capsys, target, tmp_path):
    own = tiny_llama(0, vocab_size=VOCAB, hidden_size=WIDTH, num_layers=2).config
    sizes = {"target_hidden_size": WIDTH, "target_vocab_size": VOCAB, "aux_layers": (0, 1)}
    config = Eagle3Config(layers=own, mask_token_id=VOCAB - 1, **sizes)
    raw = {
        "architectures": ["PEagleDraftModel"],
        "hidden_size": WIDTH,
        "intermediate_size": own.intermediate_size,
        "num_attention_heads": own.num_heads,
        "num_key_value_heads": own.num_kv_heads,
        "vocab_size": VOCAB,
        "mask_token_id": VOCAB - 1,
        "eagle_aux_hidden_state_layer_ids": [0, 1],
    }
    folder = write(tmp_path, raw, random_tensors(eagle3.weights_of(config)))
    figures = found(capsys, folder, "--target", target[0])
    assert (figures["method"], figures["captures"]) == ("eagle3", [0, 1])
    assert f"in one pass, with token {VOCAB - 1} as their mask" in figures["notes"][1]
    # Keys and values of two layers, and what is stored for them of each token.
    per_layer = 2 * own.num_kv_heads * own.head_dim
    assert figures["kv_numbers_per_token"] == 2 * per_layer
    assert figures["stored_numbers_per_token"] == own.hidden_size


def test_a_head_that_does_not_fit_says_why(capsys, target, tmp_path):
    folder = eagle_folder(tmp_path, target)
    assert "32 hidden numbers" in refused(capsys, folder, "--target", "demo")
    message = refused(capsys, folder, "--target", target[0], "--aux-layer-ids", "1,2")
    assert "reads the last hidden state" in message


def test_heads_of_a_file_with_another_name(capsys, target, tmp_path):
    config = MedusaConfig(
        target_hidden_size=WIDTH, target_vocab_size=VOCAB, aux_layers=(LAYERS,), most_drafts=2
    )
    raw = {"medusa_num_heads": 2, "medusa_num_layers": 1}
    folder = write(tmp_path, raw, random_tensors(medusa.weights_of(config)))
    (folder / "model.safetensors").rename(folder / "medusa_lm_head.safetensors")
    figures = found(capsys, folder, "--target", target[0])
    assert (figures["method"], figures["drafts_at_most"]) == ("medusa", 2)
    assert figures["tensors"] == 6


def test_a_model_with_a_layer_of_its_own_that_drafts(capsys, tmp_path):
    own = tiny_llama(0, vocab_size=VOCAB, hidden_size=WIDTH, num_layers=LAYERS, qkv_bias=True)
    save_llama(tmp_path, own)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw |= {"model_type": "mimo", "num_nextn_predict_layers": 1}
    from specjax.models.weight_files import open_folder

    tensors = {name: np.array(tensor) for name, tensor in open_folder(tmp_path).items()}
    layer = EagleConfig(
        layers=own.config.first_layers(1),
        target_vocab_size=VOCAB,
        aux_layers=(LAYERS + 1,),
        is_mtp=True,
    )
    leaves = eagle.weights_of(layer, f"model.{MTP_PREFIX}")
    folder = write(tmp_path, raw, tensors | random_tensors(leaves))
    figures = found(capsys, folder, "--target", folder)
    assert figures["family"] == "mimo"
    assert figures["kv_numbers_per_token"] == 2 * LAYERS * own.config.num_kv_heads * 8
    assert "method 'mtp'" in figures["notes"][0]


def test_what_is_asked_of_the_wrong_folder(capsys, target, tmp_path):
    folder = eagle_folder(tmp_path, target)
    assert "holds a head of method 'eagle'" in refused(capsys, folder, "--target", folder)
    assert "holds a head" in refused(capsys, target[0], "--target", folder)
    ids = ["--aux-layer-ids", "1,2"]
    assert "for a head over a target" in refused(capsys, target[0], *ids)
    assert "needs the target" in refused(capsys, folder, *ids)


def test_what_is_no_folder(capsys, tmp_path):
    assert "config.json" in refused(capsys, tmp_path)
    with pytest.raises(SystemExit):
        main(["inspect", str(tmp_path), "--aux-layer-ids", "1,x"])
    assert "whole numbers with commas" in capsys.readouterr().err
