"""Heads that are saved in int8 come back as what is stored, and are stored so again."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from written_heads import CASES

import specjax
from specjax.models import int8_writing, safetensors, weight_writing
from specjax.models.int8_reading import Int8Matrix
from specjax.models.weight_files import open_weights

PAIRS = [(name, naming) for name, case in CASES.items() for naming in case.namings]
PLAIN = [name for name in CASES if name.endswith("plain")]
QUICK = [pair for pair in PAIRS if pair[0] in PLAIN]


def raw_of(folder):
    return json.loads((folder / "config.json").read_text())


def file_of(folder):
    (path,) = folder.glob("*.safetensors")
    return path


def assert_near(ours, theirs):
    """Matrices are as near as 8 bits can be, and vectors and tables equal."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.dtype == theirs.dtype
    if ours.ndim < 2:
        np.testing.assert_array_equal(ours, theirs)
    else:
        most = np.abs(theirs).max(axis=-1, keepdims=True) / 127
        assert np.all(np.abs(ours - theirs) <= 0.51 * most)


@pytest.mark.parametrize("pair", quick(PAIRS, *QUICK), ids=" as ".join)
def test_a_head_there_and_back(pair, tmp_path):
    case, naming = CASES[pair[0]], pair[1]
    head, keys = case.load(), {"naming": naming, "target": case.target, "stored": "int8"}
    specjax.save_pretrained(head, tmp_path / "a", **keys)
    loaded = specjax.load_drafter(tmp_path / "a", case.target)
    assert loaded.spec == head.spec
    jax.tree.map(assert_near, loaded.params, head.params)
    for name, tensor in open_weights(file_of(tmp_path / "a")).items():
        is_matrix = tensor.ndim > 1 and name.endswith(".weight")
        assert isinstance(tensor, Int8Matrix) == is_matrix, name
    specjax.save_pretrained(loaded, tmp_path / "b", **keys)
    assert file_of(tmp_path / "a").read_bytes() == file_of(tmp_path / "b").read_bytes()
    assert raw_of(tmp_path / "a") == raw_of(tmp_path / "b")


def test_a_head_in_bfloat16(tmp_path):
    case = CASES["EAGLE-3, a part of the vocabulary"]
    specjax.save_pretrained(case.load(), tmp_path / "a", stored="int8")
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), case.target.params)
    target = dataclasses.replace(case.target, params=params)
    loaded = specjax.load_drafter(tmp_path / "a", target)
    assert loaded.params["fc"].dtype == jnp.bfloat16
    specjax.save_pretrained(loaded, tmp_path / "b", stored="int8")
    first, again = (safetensors.open_file(file_of(tmp_path / name)) for name in "ab")
    for name in ("fc.weight", "fc.weight_scale", "lm_head.weight", "lm_head.weight_scale", "d2t"):
        assert first[name].tobytes() == again[name].tobytes()
    # What is saved whole says nothing of int8.
    specjax.save_pretrained(loaded, tmp_path / "b")
    assert "quantization_config" not in raw_of(tmp_path / "b")
    assert "int8" not in (tmp_path / "b" / "README.md").read_text()


def test_the_card_names_no_server(tmp_path):
    case = CASES["EAGLE-3, plain"]
    specjax.save_pretrained(case.load(), tmp_path, target=case.target, stored="int8")
    card = (tmp_path / "README.md").read_text()
    assert "| stored in | int8, with a scale per output of a matrix |" in card
    assert "specjax.load_drafter" in card
    assert "vllm" not in card
    assert "sglang" not in card


@pytest.mark.parametrize("name", PLAIN)
def test_a_scale_that_is_none_is_named(name, tmp_path):
    case = CASES[name]
    specjax.save_pretrained(case.load(), tmp_path, target=case.target, stored="int8")
    path = file_of(tmp_path)
    tensors = {name: np.array(each) for name, each in safetensors.open_file(path).items()}
    scale = next(name for name in tensors if name.endswith("_scale"))
    tensors[scale][0] = np.nan
    made = {name: weight_writing.of_array(name, each) for name, each in tensors.items()}
    weight_writing.write_file(path, made)
    with pytest.raises(ValueError, match=rf"{path.name}: tensor '{scale}' holds nan"):
        specjax.load_drafter(tmp_path, case.target)


def test_inspect_and_a_warning(tmp_path):
    case = CASES["Medusa, plain"]
    specjax.save_pretrained(case.target, tmp_path / "target")
    specjax.save_pretrained(case.load(), tmp_path / "head", stored="int8")
    raw = raw_of(tmp_path / "head")
    raw["quantization_config"]["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    (tmp_path / "head" / "config.json").write_text(json.dumps(raw))
    from specjax.heads.inspection import inspect

    count = sum(leaf.ndim > 1 for leaf in jax.tree.leaves(case.load().params))
    for target in (None, tmp_path / "target"):
        assert inspect(tmp_path / "head", target)["stored_in_int8"] == count
    with pytest.warns(UserWarning, match=r"few bits of what is computed.*group_0.input_act"):
        specjax.load_drafter(tmp_path / "head", case.target)


def test_what_was_written_is_compared(tmp_path, monkeypatch):
    """A matrix whose scales are those of another one."""
    rounded = int8_writing.rounded

    def wrong(matrix, name):
        values, scales = rounded(matrix, name)
        return values, scales * (1.02 if name == "fc.weight" else 1)

    monkeypatch.setattr(int8_writing, "rounded", wrong)
    head = CASES["EAGLE-3, plain"].load()
    with pytest.raises(AssertionError, match=r"\['fc'\] is read as other numbers"):
        specjax.save_pretrained(head, tmp_path / "saved", stored="int8")
    assert not [*tmp_path.iterdir()]
