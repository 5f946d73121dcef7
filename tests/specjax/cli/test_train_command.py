"""specjax train: a head from files, saved and read again; errors before any work."""

import json

import pytest

import specjax
from specjax.cli import train_command
from specjax.cli.main import main
from specjax.training import kinds, trainer


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    (folder / "text").mkdir()
    for number in range(4):
        (folder / "text" / f"{number}.py").write_text(
            f"import os\n\nprint(os.getcwd(), {number})\n"
        )
    common = ["train", "--target", "demo", "--data", str(folder / "text"), "--length", "12"]
    sizes = ["--steps", "2", "--rows", "2", "--depth", "2", "--eval-every", "1"]
    return folder, [*common, *sizes]


@pytest.mark.full
def test_a_head_is_trained_saved_and_read(arguments, capsys):
    folder, common = arguments
    out = folder / "head"
    assert main([*common, "--out", str(out), "--objective", "likeliest=1", "decay=0.9"]) == 0
    shown = capsys.readouterr().out
    assert "likeliest agrees" in shown
    assert f"saved in {out}" in shown
    drafter = specjax.load_drafter(out, specjax.load_model("demo"))
    assert drafter.spec.config.layers.num_layers == 1
    assert "specjax generate" in shown
    assert "held_out" in (out / "README.md").read_text()
    train_command._check_out(out, "demo")  # it may be replaced
    more = ["--start", str(out), "--out", str(folder / "more"), "--json"]
    assert main([*common, *more]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "eagle3"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--objective", "liked=1"], "expected some of distribution, likeliest"),
        (["--head", "num_layers"], "must be NAME=VALUE"),
        (["--head", "layers=2"], "layers: no option of 'eagle3'"),
        (["--kind", "medusa", "--head", "most_drafts=1"], "depth=2 is more than the 1 tokens"),
        (["--own-texts", "2", "--prompt-tokens", "12"], "leave no room"),
    ],
)
def test_errors_come_before_any_training(arguments, capsys, monkeypatch, more, message):
    folder, common = arguments
    monkeypatch.setattr(trainer, "train", lambda *_, **__: pytest.fail("it was trained"))
    assert main([*common, "--out", str(folder / "wrong"), *more]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_with_other_files_is_refused_first(arguments, capsys, monkeypatch):
    folder, common = arguments
    monkeypatch.setattr(specjax, "load_model", lambda *_: pytest.fail("it was loaded"))
    assert main([*common, "--out", str(folder / "text")]) == 2
    assert "give one that is empty or absent" in capsys.readouterr().err


def test_a_model_is_not_replaced(arguments, capsys, monkeypatch, tmp_path):
    _, common = arguments
    monkeypatch.setattr(specjax, "load_model", lambda *_: pytest.fail("it was loaded"))
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    assert main([*common, "--out", str(tmp_path)]) == 2
    assert "holds a model that was not trained by this command" in capsys.readouterr().err
    assert main([*common, "--target", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "holds the target, which would be replaced" in capsys.readouterr().err


def test_every_kind_can_be_asked_for():
    assert tuple(kinds.KINDS) == train_command.KINDS
