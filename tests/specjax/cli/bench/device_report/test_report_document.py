"""A report goes on with its own device and versions alone."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.cli import json_document
from specjax.cli.bench.device_report import document as documents
from specjax.cli.bench.device_report import report


@pytest.fixture
def made_on():
    return documents.environment(jax.devices()[0], "tiny")


def test_what_a_report_was_made_on(made_on):
    assert made_on["platform"] == "cpu"
    assert made_on["jax"] == jax.__version__
    assert made_on["num_devices"] == jax.device_count()
    assert (made_on["host_cpu"] and made_on["plugin"] is None) or "libtpu" in made_on["plugin"]
    assert json.loads(json.dumps(made_on)) == made_on


@pytest.mark.parametrize(
    ("name", "other"),
    [("device_kind", "TPU v9"), ("jax", "0.0.1"), ("size", "full"), ("commit", "abc-dirty")],
)
def test_figures_of_another_device_or_version_do_not_mix(tmp_path, made_on, name, other):
    documents.save(tmp_path, documents.new(made_on | {name: other}))
    with pytest.raises(ValueError, match=f"{name} {other}, and this is .*give another folder"):
        report.make_report(
            tmp_path, minutes=1, size="tiny", again=False, say=lambda line: None, stages=[]
        )


def test_another_day_goes_on(tmp_path, made_on):
    documents.save(tmp_path, documents.new(made_on | {"date": "2001-01-01"}))
    assert documents.open_or_new(tmp_path, made_on)["made_on"]["date"] == "2001-01-01"


def test_another_host_of_the_same_accelerator_goes_on(tmp_path, made_on):
    chip = made_on | {"platform": "tpu", "device_kind": "TPU v5 lite"}
    documents.save(tmp_path, documents.new(chip | {"host_cpu": "another", "host_cores": 1000}))
    assert documents.open_or_new(tmp_path, chip)
    documents.save(tmp_path, documents.new(made_on | {"host_cpu": "another"}))
    with pytest.raises(ValueError, match="host_cpu another"):
        documents.open_or_new(tmp_path, made_on)
    documents.save(tmp_path, documents.new(made_on | {"host_cores": 1000}))
    with pytest.raises(ValueError, match="host_cores 1000"):
        documents.open_or_new(tmp_path, made_on)


@pytest.mark.parametrize("text", ['{"cases": ', "[]", '{"schema_version": 0}', "null"])
def test_a_file_that_is_no_report(tmp_path, made_on, text):
    (tmp_path / documents.NAME).write_text(text)
    with pytest.raises(ValueError, match=r"report\.json .*give another folder"):
        documents.open_or_new(tmp_path, made_on)
    assert (tmp_path / documents.NAME).read_text() == text


@pytest.mark.parametrize(
    "damage",
    [
        {"made_on": None},
        {"made_on": {"jax": "1"}},
        {"cases": None},
        {"cases": ["a"]},
        {"cases": {"a": "x"}},
        {"cases": {"a": {"result": [1]}}},
        {"cases": {"a": {"failed": None}}},
        {"cases": {"a": {"attempts": "2"}}},
        {"cases": {"a": {"result": {}, "round": None}}},
        {"round": "first"},
    ],
)
def test_a_damaged_report(tmp_path, made_on, damage):
    text = json.dumps(documents.new(made_on) | damage)
    (tmp_path / documents.NAME).write_text(text)
    with pytest.raises(ValueError, match=r"report\.json is damaged: .*give another folder"):
        documents.open_or_new(tmp_path, made_on)
    assert (tmp_path / documents.NAME).read_text() == text


def test_a_schema_without_the_rest_is_damaged(tmp_path, made_on):
    (tmp_path / documents.NAME).write_text('{"schema_version": 1}')
    with pytest.raises(ValueError, match="is damaged: made_on"):
        documents.open_or_new(tmp_path, made_on)


def test_a_text_is_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "page.md"
    documents.save_text(path, "before")

    def full(self, text, **options):
        with self.open("w") as file:
            file.write(text[:2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(type(path), "write_text", full)
        with pytest.raises(OSError, match=r"page\.md cannot be written \(No space left"):
            documents.save_text(path, "after")
    assert path.read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["page.md"]


def test_a_folder_that_cannot_be_written(tmp_path, made_on):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot be written"):
        documents.save(tmp_path / "file" / "folder", documents.new(made_on))


def test_values_become_plain_json():
    value = {1: (np.float32(1.5), jnp.int32(2)), "none": float("inf"), "array": np.arange(2)}
    assert json_document.plain(value) == {"1": [1.5, 2], "none": None, "array": [0, 1]}
