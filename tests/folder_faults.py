"""Faults of a folder with config.json and safetensors, each made from a random.Random."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

LEAVES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 7, 100, 2**31 - 1, 2**31, 2**32, 2**63, 10**40,
    0.5, -2.5, 1e300, float("nan"), float("inf"), float("-inf"), "", "a", "1", "true",
    "\u4f60\ud800", "a" * 10_000, [], {}, [1, "a"], [[]], {"a": 1}, {"type": "a"},
    [0] * 10_000, [2**31], ["a"] * 3,
)  # fmt: skip
# What the tokenizers library reads is changed by hand: a change at random may end the process.
_LEFT_ALONE = "tokenizer.json"


def dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def weights(folder: Path) -> Path:
    return next(p for p in sorted(folder.iterdir()) if p.suffix == ".safetensors")


def nodes(value: Any, keys: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the way to every node, some of those in long lists."""
    ways = [keys] if keys else []
    inner = value.items() if isinstance(value, dict) else ()
    inner = enumerate(value) if isinstance(value, list) else inner
    for key, each in list(inner)[:40]:
        ways += nodes(each, (*keys, key))
    return ways


def mutate(rng: random.Random, value: Any) -> str:
    """Changes one node of a JSON value in place."""
    way = rng.choice(nodes(value))
    *way, key = way
    for each in way:
        value = value[each]
    kind = rng.randrange(6)
    if kind == 0:
        del value[key]
    elif kind == 1:
        value[key] = [value[key]]
    elif kind == 2 and isinstance(value, dict):
        value[f"{key}_"] = value.pop(key)
    elif kind == 3 and isinstance(value[key], int | float):
        value[key] = rng.choice((-value[key], value[key] * 2, value[key] + 1, value[key] - 1))
    else:
        value[key] = rng.choice(LEAVES)
    return f"{[*way, key]} {kind}"


def json_file(rng: random.Random, folder: Path) -> Path:
    # The largest share to the files of most keys.
    names = ["config.json"] * 4 + ["generation_config.json"]
    names += ["tokenizer_config.json", "model.safetensors.index.json"]
    files = [folder / name for name in names if (folder / name).exists()]
    return rng.choice(files)


def change_a_value(rng: random.Random, folder: Path) -> str:
    path = json_file(rng, folder)
    value = json.loads(path.read_text())
    said = mutate(rng, value)
    dump(path, value)
    return f"{path.name} {said}"


def change_a_config(rng: random.Random, folder: Path) -> str:
    path = folder / "config.json"
    value = json.loads(path.read_text())
    said = mutate(rng, value)
    dump(path, value)
    return said


def change_a_header(rng: random.Random, folder: Path) -> str:
    header, data = split(weights(folder))
    said = mutate(rng, header)
    join(weights(folder), header, data)
    return said


def change_offsets(rng: random.Random, folder: Path) -> str:
    header, data = split(weights(folder))
    header.pop("__metadata__", None)
    one, other = rng.sample(sorted(header), 2)
    kind = rng.randrange(4)
    if kind == 0:
        header[one]["data_offsets"] = header[other]["data_offsets"]
    elif kind == 1:
        header[one]["data_offsets"] = [x + 4 for x in header[one]["data_offsets"]]
    elif kind == 2:
        header[one]["dtype"] = rng.choice(("I32", "U32", "F64", "BOOL", "I8", "F8_E4M3"))
    else:
        header[one]["shape"] = [*header[one]["shape"][::-1], 1]
    join(weights(folder), header, data)
    return f"{one} {kind}"


def change_the_header_length(rng: random.Random, folder: Path) -> str:
    path = weights(folder)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    kind = rng.choice((1, -1, 8, -8, len(content), -length))
    path.write_bytes((length + kind).to_bytes(8, "little") + content[8:])
    return str(kind)


def change_bytes(rng: random.Random, folder: Path) -> str:
    path = rng.choice(sorted(p for p in folder.iterdir() if p.name != _LEFT_ALONE))
    content = bytearray(path.read_bytes())
    kind = rng.randrange(6)
    at = rng.randrange(min(len(content), 4000))
    if kind == 0:
        content = content[:at]
    elif kind == 1:
        for _ in range(8):
            content[rng.randrange(min(len(content), 4000))] = rng.randrange(256)
    elif kind == 2:
        content[at:at] = rng.randbytes(16)
    elif kind == 3:
        content += content[at : at + 100]
    elif kind == 4:
        content[at:at] = rng.choice((b"[", b'{"a":')) * 3
    else:
        content[at : at + rng.randrange(1, 200)] = b""
    path.write_bytes(content)
    return f"{path.name} {kind} {at}"


def change_the_file(rng: random.Random, folder: Path) -> str:
    path = rng.choice(sorted(p for p in folder.iterdir() if p.name != _LEFT_ALONE))
    kind = rng.randrange(7)
    content = path.read_bytes()
    path.unlink()
    if kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to(__file__)
    elif kind == 3:
        path.symlink_to(path.with_name("missing"))
    elif kind == 4:
        path.symlink_to(os.devnull)
    elif kind == 5:
        path.write_bytes(b"")
    elif kind == 6:
        path.write_bytes(b"\xff\xfe" + content)
    return f"{path.name} {kind}"


def give_a_key_twice(rng: random.Random, folder: Path) -> str:
    path = json_file(rng, folder)
    text = path.read_text().strip()
    key = rng.choice(sorted(json.loads(text)))
    path.write_text(text[:-1] + f', "{key}": {json.dumps(rng.choice(LEAVES[:20]))}}}')
    return f"{path.name} {key}"
