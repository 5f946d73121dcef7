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

from specjax.text import template_process, tokenizer_json

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

TEMPLATES = (
    "{{ raise_exception('roles must alternate') }}",
    "{{ messages[0].nothing.more }}",
    "{{ messages[0]._kept.more }}",
    "{{ 1 / 0 }}",
    "{{ 1 | no_filter }}",
    "{{ messages[0].content + 1 }}",
    "{% for m in messages %}",
    "{% if %}",
    "{{ messages | tojson(indent='a') }}",
    "{{ 'a' * 40_000 }}",
    "",
)
# Lengthen a text, or are none: the library says so, or the limits that `main` lowers.
STAGES = (
    {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 8},
    {"type": "Prepend", "prepend": "x" * 8},
    {"type": "Lowercase"},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
    {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
    {"type": "Prepend", "prepend": 5},
    {"type": "Strip"},
    {"type": "X"},
    {},
)
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
    template = rng.choice(TEMPLATES)
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
    stage = rng.choice(STAGES)
    times = rng.choice((1, 2, 5))
    if times > 1:
        stage = {"type": "Sequence", _LISTS[part]: [stage] * times}
    value[part] = stage
    dump(path, value)
    return f"{part} x{times} {json.dumps(stage)[:80]}"


def change_a_vocabulary(rng: random.Random, folder: Path) -> str:
    path = folder / "tokenizer.json"
    value = json.loads(path.read_text())
    model = value["model"]
    kind = rng.randrange(5)
    if kind == 0:
        value["added_tokens"][0]["id"] = rng.choice((-1, "a", 0.5))
    elif kind == 1:
        model["unk_token"] = model["unk_id"] = rng.choice((-1, "nothing"))
    elif kind == 2 and "merges" in model:
        model["merges"] = rng.choice(([["a", "c"]], ["a b c"], [["a"]], [1], [["", ""]]))
    elif kind == 3:
        model["type"] = "X"
    else:
        model["vocab"] = rng.choice(({"a": -1}, {"a": "0"}, [1], 5))
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
    change_a_vocabulary,
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
    tokenizer_json.MAX_GROWTH, tokenizer_json._MAX_PREPENDED_CHARS = 64, 4
    tokenizer_json._MAX_STAGES, template_process.MAX_OUTPUT_CHARS = 4, 10_000
    sound = Path(sys.argv[1])
    for name in FAMILIES:  # so that what jax takes once is not counted
        shutil.copytree(GOLDENS / name, sound / name, dirs_exist_ok=True)
        use_folder(sound / name)
    serve(make_folder, use_folder)


if __name__ == "__main__":
    main()
