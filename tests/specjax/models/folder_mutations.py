"""Model folders with one thing wrong, made from a seed; as a script it loads them."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import tokenizers
from folder_faults import (
    change_a_config,
    change_a_header,
    change_a_value,
    change_bytes,
    change_offsets,
    change_the_file,
    change_the_header_length,
    dump,
    give_a_key_twice,
    split,
)
from folder_sweep import message_of, serve
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

GOLDENS = Path(__file__).resolve().parents[2] / "goldens"
FAMILIES = ("llama", "llama_tied", "llama_yarn", "qwen2", "qwen2_sliding", "qwen3")
FAMILIES += ("mistral", "granite", "gpt2")
SHARD = "model-00001-of-00001.safetensors"
TEMPLATE = (
    "{% set ns = namespace(turn=0) %}{% for message in messages %}"
    "{% set ns.turn = ns.turn + 1 %}{{ '<|im_start|>' ~ message['role'] + '\n' + "
    "message.content | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

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
    dump(folder / "tokenizer_config.json", special | {"chat_template": TEMPLATE})
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
    header, _ = split(folder / SHARD)
    names = [name for name in header if name != "__metadata__"]
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, SHARD)}
    dump(folder / "model.safetensors.index.json", index)


def write_a_template(rng: random.Random, folder: Path) -> str:
    template = rng.choice(HOSTILE_TEMPLATES)
    if rng.random() < 0.5:
        at, end = sorted(rng.randrange(len(TEMPLATE)) for _ in range(2))
        template = TEMPLATE[:at] + rng.choice(("", "{{", "%}", "~", "'")) + TEMPLATE[end:]
    if rng.random() < 0.5:
        (folder / "chat_template.jinja").write_text(template)
    else:
        dump(folder / "tokenizer_config.json", {"chat_template": template})
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
    dump(path, value)
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
    dump(path, value)
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


def use_folder(folder: Path) -> tuple[str, None]:
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
        return message_of(error), None
    ids = jax.ShapeDtypeStruct((1, 5), "int32")
    jax.eval_shape(lambda p, i: uncached_logits(p, model.config, i), model.params, ids)
    tokenizer = model.tokenizer
    if tokenizer is None:
        return said, None
    for use in (
        lambda: tokenizer.decode(tokenizer.encode("a ab 12 \u4f60")),
        lambda: tokenizer.encode_chat([{"role": "user", "content": "a b"}]),
    ):
        try:
            use()
        except ValueError as error:
            said += f"; {message_of(error)}"
    return said, None


def main() -> None:
    sound = Path(sys.argv[1])
    for name in FAMILIES:  # so that what jax takes once is not counted
        shutil.copytree(GOLDENS / name, sound / name, dirs_exist_ok=True)
        use_folder(sound / name)
    serve(make_folder, use_folder)


if __name__ == "__main__":
    main()
