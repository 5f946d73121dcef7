"""Model folders with one thing wrong, made from a seed, and a child that loads them.

As a script it reads `seed folder` lines, makes and loads each folder, and writes one line
of JSON per folder: what came of it, seconds, and megabytes at the peak. What ends the
process is seen by whoever started it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

GOLDENS = Path(__file__).resolve().parents[2] / "goldens"
FAMILIES = ("llama", "llama_tied", "llama_yarn", "qwen2", "qwen2_sliding", "qwen3")
FAMILIES += ("mistral", "granite", "gpt2")
SHARD = "model-00001-of-00001.safetensors"
MEMORY_LIMIT = 24 * 2**30  # of addresses; far above what is asserted
TEMPLATE = (
    "{% set ns = namespace(turn=0) %}{% for message in messages %}"
    "{% set ns.turn = ns.turn + 1 %}{{ '<|im_start|>' ~ message['role'] + '\n' + "
    "message.content | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LEAVES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 7, 100, 10**7, 2**31 - 1, 2**31, 2**32, 2**63, 10**40,
    0.5, -2.5, 1e300, float("nan"), float("inf"), float("-inf"), "", "a", "1", "true",
    "\u4f60\ud800", "a" * 100_000, [], {}, [1, "a"], [[]], {"a": 1}, {"type": "a"},
    [0] * 100_000, [2**31], ["a"] * 3,
)  # fmt: skip
HOSTILE_TEMPLATES = (
    "{{ 'a' * 10**9 }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% set x = 10 ** 10 ** 8 ** 3 %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(90) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(90) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "{{ 'a' | center(10**9) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ ('{0.__class__}' | attr('format'))(messages) }}",
    "{{ range(99999) | join('a' * 99999) }}",
    "{{ lipsum(n=10**8) }}",
    "{{ (" * 20_000,
)
HOSTILE_STAGES = (
    {"type": "Precompiled", "precompiled_charsmap": "/////wAA"},
    {"type": "Precompiled", "precompiled_charsmap": ""},
    {"type": "FixedLength", "length": 0},
    {"type": "Strip", "content": "a", "start": 10**9, "stop": 10**9},
    {"type": "Prepend", "prepend": "x" * 10**6},
    {"type": "Replace", "pattern": {"String": ""}, "content": "b"},
    {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10**5},
    {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"Regex": "(a|a)*" * 9 + "z"}, "behavior": "Removed", "invert": False},
    {"type": "ByteLevel"},
)  # fmt: skip
_LISTS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "decoder": "decoders",
    "post_processor": "processors",
}


def make_folder(seed: int, folder: Path) -> str:
    """Writes the folder of a seed; returns what is wrong with it."""
    rng = random.Random(seed)
    name = FAMILIES[seed % len(FAMILIES)]
    folder.mkdir(parents=True)
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        if (GOLDENS / name / file).exists():
            shutil.copy(GOLDENS / name / file, folder / file)
    _tokenizer(seed).save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
    _dump(folder / "tokenizer_config.json", special | {"chat_template": TEMPLATE})
    if seed % 4 == 3:
        _shard(folder)
    change = rng.choice(_CHANGES)
    return f"{name}: {change.__name__} {change(rng, folder)}"


def _tokenizer(seed: int) -> tokenizers.Tokenizer:
    if seed % 2:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {piece: index for index, piece in enumerate(alphabet)}
        vocab["ab"] = len(vocab)
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
        digits = pre_tokenizers.Split(tokenizers.Regex(r"\p{N}{1,3}"), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        backend.decoder = decoders.ByteLevel()
    else:
        pieces = [("<unk>", 0.0), *((f"<0x{i:02X}>", -9.0) for i in range(256))]
        pieces += [("\u2581", -2.0), ("a", -3.0), ("\u2581a", -2.5)]
        backend = tokenizers.Tokenizer(models.Unigram(pieces, 0, byte_fallback=True))
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace("\u2581", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    backend.add_special_tokens(["<s>", "</s>", "<|im_start|>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>") or 0)]
    )
    return backend


def _shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / SHARD)
    header, _ = _split(folder / SHARD)
    names = [name for name in header if name != "__metadata__"]
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, SHARD)}
    _dump(folder / "model.safetensors.index.json", index)


def _dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def _split(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _join(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _weights(folder: Path) -> Path:
    return next(p for p in sorted(folder.iterdir()) if p.suffix == ".safetensors")


def _nodes(value: Any, keys: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the way to every node, some of those in long lists."""
    ways = [keys] if keys else []
    inner = value.items() if isinstance(value, dict) else ()
    inner = enumerate(value) if isinstance(value, list) else inner
    for key, each in list(inner)[:40]:
        ways += _nodes(each, (*keys, key))
    return ways


def _mutate(rng: random.Random, value: Any) -> str:
    """Changes one node of a JSON value in place."""
    way = rng.choice(_nodes(value))
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


def _json_file(rng: random.Random, folder: Path) -> Path:
    # The largest share to the files of most keys.
    names = ["config.json"] * 4 + ["tokenizer.json"] * 4 + ["generation_config.json"]
    names += ["tokenizer_config.json", "model.safetensors.index.json"]
    files = [folder / name for name in names if (folder / name).exists()]
    return rng.choice(files)


def change_a_value(rng: random.Random, folder: Path) -> str:
    path = _json_file(rng, folder)
    value = json.loads(path.read_text())
    said = _mutate(rng, value)
    _dump(path, value)
    return f"{path.name} {said}"


def change_a_config(rng: random.Random, folder: Path) -> str:
    path = folder / "config.json"
    value = json.loads(path.read_text())
    said = _mutate(rng, value)
    _dump(path, value)
    return said


def change_a_header(rng: random.Random, folder: Path) -> str:
    header, data = _split(_weights(folder))
    said = _mutate(rng, header)
    _join(_weights(folder), header, data)
    return said


def change_offsets(rng: random.Random, folder: Path) -> str:
    header, data = _split(_weights(folder))
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
    _join(_weights(folder), header, data)
    return f"{one} {kind}"


def change_the_header_length(rng: random.Random, folder: Path) -> str:
    path = _weights(folder)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    kind = rng.choice((1, -1, 8, -8, 2 * 10**9, 2**63, -length))
    length = (length + kind) % 2**64
    path.write_bytes(length.to_bytes(8, "little") + content[8:])
    if kind == 2 * 10**9:
        os.truncate(path, 3 * 10**9)
    return str(kind)


def change_bytes(rng: random.Random, folder: Path) -> str:
    path = rng.choice(sorted(p for p in folder.iterdir() if p.is_file()))
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
        content[at:at] = rng.choice((b"[", b'{"a":')) * 100_000
    else:
        content[at : at + rng.randrange(1, 200)] = b""
    path.write_bytes(content)
    return f"{path.name} {kind} {at}"


def change_the_file(rng: random.Random, folder: Path) -> str:
    path = rng.choice(sorted(folder.iterdir()))
    kind = rng.randrange(8)
    content = path.read_bytes()
    path.unlink()
    if kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to("/etc/hostname")
    elif kind == 3:
        os.mkfifo(path)
    elif kind == 4:
        path.symlink_to(path.name)
    elif kind == 5:
        path.symlink_to("/dev/zero")
    elif kind == 6:
        path.write_bytes(b"")
    elif kind == 7:
        path.write_bytes(b"\xff\xfe" + content)
    return f"{path.name} {kind}"


def give_a_key_twice(rng: random.Random, folder: Path) -> str:
    path = _json_file(rng, folder)
    text = path.read_text().strip()
    key = rng.choice(sorted(json.loads(text)))
    path.write_text(text[:-1] + f', "{key}": {json.dumps(rng.choice(LEAVES[:20]))}}}')
    return f"{path.name} {key}"


def write_a_template(rng: random.Random, folder: Path) -> str:
    template = rng.choice(HOSTILE_TEMPLATES)
    if rng.random() < 0.5:
        at, end = sorted(rng.randrange(len(TEMPLATE)) for _ in range(2))
        template = TEMPLATE[:at] + rng.choice(("", "{{", "%}", "~", "'")) + TEMPLATE[end:]
    if rng.random() < 0.5:
        (folder / "chat_template.jinja").write_text(template)
    else:
        _dump(folder / "tokenizer_config.json", {"chat_template": template})
    return template[:80]


def write_a_stage(rng: random.Random, folder: Path) -> str:
    path = folder / "tokenizer.json"
    value = json.loads(path.read_text())
    part = rng.choice(sorted(_LISTS))
    stage = rng.choice(HOSTILE_STAGES)
    times = rng.choice((1, 2, 6, 24, 200))
    if times > 1:
        stage = {"type": "Sequence", _LISTS[part]: [stage] * times}
    if times == 200:
        for _ in range(rng.choice((50, 300))):
            stage = {"type": "Sequence", _LISTS[part]: [stage]}
    value[part] = stage
    _dump(path, value)
    return f"{part} x{times} {json.dumps(stage)[:80]}"


def change_numbers_of_tokens(rng: random.Random, folder: Path) -> str:
    path = folder / "tokenizer.json"
    value = json.loads(path.read_text())
    model = value["model"]
    kind = rng.randrange(6)
    if kind == 0:
        for token in value["added_tokens"]:
            token["id"] = rng.choice((2**31, 2**32 - 1, 2**32, -1, 10**6))
    elif kind == 1:
        model["unk_token"] = model["unk_id"] = rng.choice((10**6, -1, "nothing"))
    elif kind == 2:
        model["continuing_subword_prefix"] = rng.choice(("#", "####", "\u4f60"))
    elif kind == 3 and "merges" in model:
        model["merges"] = rng.choice(([["a", "c"]], ["a b c"], [["a"]], [1], [["", ""]]))
    elif kind == 4:
        model["type"] = rng.choice(("BPE", "WordPiece", "WordLevel", "Unigram", "X"))
    else:
        model["vocab"] = rng.choice(({}, [], {"a": 2**32 - 1}, {"a": 0, "b": 0}, [["a", 0]]))
    _dump(path, value)
    return str(kind)


_CHANGES: tuple[Callable[[random.Random, Path], str], ...] = (
    change_a_value,
    change_a_value,
    change_a_config,
    change_a_config,
    change_a_header,
    change_offsets,
    change_the_header_length,
    change_bytes,
    change_bytes,
    change_the_file,
    give_a_key_twice,
    write_a_template,
    write_a_stage,
    change_numbers_of_tokens,
)


def use_folder(folder: Path) -> str:
    """Loads a folder and uses what it holds; returns what came of it.

    "loaded", or the message of a ValueError or FileNotFoundError. Anything else is raised.
    """
    import jax
    from helpers import uncached_logits

    from specjax.models.loading import load_model

    said = "loaded"
    try:
        model = load_model(folder)
    except (ValueError, FileNotFoundError) as error:
        return _message(error)
    ids = jax.ShapeDtypeStruct((1, 5), "int32")
    jax.eval_shape(lambda p, i: uncached_logits(p, model.config, i), model.params, ids)
    tokenizer = model.tokenizer
    if tokenizer is None:
        return said
    for use in (
        lambda: tokenizer.decode(tokenizer.encode("a ab 12 \u4f60")),
        lambda: tokenizer.encode_chat([{"role": "user", "content": "a b"}]),
    ):
        try:
            use()
        except ValueError as error:
            said += f"; {_message(error)}"
    return said


def _message(error: Exception) -> str:
    message = str(error)
    assert 20 < len(message) < 4000, f"a message of {len(message)}: {message[:200]}"
    assert not message.startswith("[Errno"), message
    return f"{type(error).__name__}: {message}"


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main() -> None:
    import resource
    import warnings

    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    sound = Path(sys.argv[1])
    for name in FAMILIES:  # so that what jax takes once is not counted
        shutil.copytree(GOLDENS / name, sound / name, dirs_exist_ok=True)
        use_folder(sound / name)
    for line in sys.stdin:
        seed, path = line.split()
        what = make_folder(int(seed), Path(path))
        Path("/proc/self/clear_refs").write_text("5")
        before = _peak_bytes()
        # Of the processor, which other processes may use meanwhile.
        start = time.process_time()
        try:
            said = use_folder(Path(path))
            is_right = True
        except BaseException as error:
            said, is_right = f"{type(error).__name__}: {error}"[:500], False
        answer = {
            "seed": int(seed),
            "what": what,
            "said": said,
            "is_right": is_right,
            "seconds": time.process_time() - start,
            "megabytes": (_peak_bytes() - before) / 1e6,
        }
        shutil.rmtree(path)
        sys.__stdout__.write(json.dumps(answer) + "\n")
        sys.__stdout__.flush()


if __name__ == "__main__":
    main()
