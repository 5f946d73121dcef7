"""Files that one process keeps for the next, whatever lies in their place."""

import json
import os

import pytest

from specjax.runtime import kept_files


def test_what_is_written_comes_back(tmp_path):
    path = tmp_path / "new" / "kept.json"
    assert kept_files.write_json(path, {"a": [1, 2.5, None]})
    assert kept_files.read_json(path) == {"a": [1, 2.5, None]}
    assert [each.name for each in path.parent.iterdir()] == ["kept.json"]


def test_nothing_is_written_where_a_file_is_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    assert not kept_files.write_json(tmp_path / "file" / "kept.json", {})


@pytest.mark.parametrize("text", ["", "{", "[[", "a"])
def test_what_is_no_json_is_refused(tmp_path, text):
    path = tmp_path / "kept.json"
    path.write_text(text)
    with pytest.raises(ValueError):
        kept_files.read_json(path)


@pytest.mark.parametrize(
    ("error", "message"),
    [(RecursionError, "it is nested too deep"), (MemoryError, "there is no memory for it")],
)
def test_json_that_python_cannot_read_is_refused(tmp_path, monkeypatch, error, message):
    def fails(*_, **__):
        raise error

    path = tmp_path / "kept.json"
    path.write_text("{}")
    monkeypatch.setattr(json, "loads", fails)
    with pytest.raises(ValueError, match=message):
        kept_files.read_json(path)


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_files, "MOST_BYTES", 3)
    path = tmp_path / "kept.json"
    path.write_text(" {}")
    assert kept_files.read_json(path) == {}
    path.write_text("  {}")
    with pytest.raises(ValueError, match="larger than 3 bytes"):
        kept_files.read_json(path)


KINDS = [
    "folder",
    "nothing",
    *(["device", "loop"] if os.name == "posix" else []),
]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_not_read(tmp_path, kind):
    path = tmp_path / "kept.json"
    if kind == "device":
        path.symlink_to(os.devnull)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    with pytest.raises(OSError, match="no file"):
        kept_files.read_json(path)
