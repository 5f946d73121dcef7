"""Folders of drafters with one thing wrong, made from a seed; as a script it loads them.

Every kind of head over a target is among them, and a draft model over masks.
"""

from __future__ import annotations

import functools
import json
import pickle
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import test_dflash_files
import test_eagle1
import test_eagle_files
import test_mtp
import test_newest_state
from folder_faults import (
    change_a_config,
    change_a_header,
    change_bytes,
    change_offsets,
    change_the_file,
    change_the_header_length,
    dump,
    give_a_key_twice,
    join,
)
from folder_sweep import message_of, serve
from head_folders import random_tensors, write
from helpers import first_layer, save_llama
from torch_archives import archive

import specjax
from specjax.drafters.base import DrafterContext
from specjax.heads.equations import eagle, medusa, mlp_speculator
from specjax.heads.equations.eagle import MTP_PREFIX
from specjax.heads.equations.eagle3 import FLAT_PREFIX, NUMBERED_PREFIX
from specjax.models.base import RopeConfig
from specjax.models.weight_files import open_folder
from specjax.testing import save_model, tiny_model

WEIGHTS = "model.safetensors"
SAMPLING = specjax.SamplingParams(temperature=0, max_tokens=30)
SHALLOW, DEEP = test_newest_state.TARGET, test_eagle_files.TARGET


class Sound(NamedTuple):
    """A folder without faults, and the target that it drafts for."""

    target: Any
    write: Callable[[Path], Any]


def _head(target: Any, raw: dict, tensors: dict) -> Sound:
    return Sound(target, lambda folder: write(folder, raw, tensors))


def _mimo() -> Sound:
    own = test_mtp.OF_MIMO
    model = tiny_model(family="mimo", **{key: own[key] for key in ("qkv_bias", "rope", "norm_eps")})

    def write_to(folder: Path) -> None:
        save_model(folder, model, test_mtp.MIMO)
        tensors = {name: np.array(each) for name, each in open_folder(folder).items()}
        layer = eagle.weights_of(test_mtp.config_of(**own), test_mtp.OWN_PREFIX)
        write(folder, test_mtp.MIMO, tensors | random_tensors(layer))

    return Sound(model, write_to)


@functools.cache
def sound_folders() -> dict[str, Sound]:
    """Returns every kind of drafter that is read from a folder."""
    e1, e3, d, n = test_eagle1, test_eagle_files, test_dflash_files, test_newest_state
    own = {"has_embedding": True, "norm_before_residual": True, "num_layers": 2}
    e3_own = e3.config_of(**own, aux_layers=(0, 2, 6), norm_before_fc=True)
    captured = {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}
    layer = test_mtp.config_of(qk_norm=True, rope=RopeConfig(theta=640000.0), norm_eps=1e-5)
    small = {"vocab_size": d.DRAFT_VOCAB}
    spark = d.config_of(small, **d.OWN_TABLES, **d.MARKOV)
    return {
        "eagle": _head(SHALLOW, e1.raw_of(), e1.tensors_of(has_embedding=True, fc_bias=True)),
        "eagle3": _head(DEEP, e3.flat(), e3.tensors_of(e3.config_of(), FLAT_PREFIX)),
        "eagle3 of speculators": _head(
            DEEP, e3.nested(**captured), e3.tensors_of(e3_own, NUMBERED_PREFIX)
        ),
        "mtp": _mimo(),
        "mtp of speculators": _head(
            SHALLOW,
            test_mtp.of_speculators(),
            random_tensors(eagle.weights_of(layer, MTP_PREFIX)),
        ),
        "dflash": _head(DEEP, d.flat(), d.tensors_of(d.config_of())),
        "dflash of speculators": _head(
            DEEP, d.nested(), d.tensors_of(d.config_of(small, **d.OWN_TABLES))
        ),
        "dflash2": _head(DEEP, d.dflash2(), d.tensors_of(d.config_of(**d.OF_DFLASH2))),
        "dspark": _head(DEEP, d.dspark(), d.tensors_of(spark)),
        "medusa": _head(
            SHALLOW,
            {"medusa_num_heads": 3, "vocab_size": SHALLOW.config.vocab_size},
            random_tensors(medusa.weights_of(n.HEADS["Medusa"])),
        ),
        "mlp_speculator": _head(
            SHALLOW, n.mlp_raw(), random_tensors(mlp_speculator.weights_of(n.HEADS["MLP"]))
        ),
        "pard": Sound(
            SHALLOW,
            lambda folder: save_llama(
                folder, first_layer(SHALLOW), pard_token=60, architectures=["LlamaForCausalLM"]
            ),
        ),
    }


def make_folder(seed: int, folder: Path) -> str:
    """Writes the folder of a seed; returns what is wrong with it."""
    rng = random.Random(seed)
    kinds = sorted(sound_folders())
    name = kinds[seed % len(kinds)]
    folder.mkdir(parents=True)
    sound_folders()[name].write(folder)
    change = rng.choice(_CHANGES)
    return f"{name}: {change.__name__} {change(rng, folder)}"


def change_a_tensor(rng: random.Random, folder: Path) -> str:
    """Another tensor under a name that is kept, in a file that is sound by itself."""
    tensors = _tensors(folder)
    name = rng.choice(sorted(tensors))
    kind = rng.choice(sorted(_TENSOR_CHANGES))
    tensors[name] = _TENSOR_CHANGES[kind](rng, tensors[name])
    _store(folder, tensors)
    return f"{name} {kind}"


_NOT_FLOATS = "bool", "int64"


def _filled(value: float) -> Callable[[random.Random, np.ndarray], np.ndarray]:
    return lambda rng, tensor: np.full_like(tensor, value if tensor.dtype.kind == "f" else 1)


def _with_one(value: float) -> Callable[[random.Random, np.ndarray], np.ndarray]:
    def change(rng: random.Random, tensor: np.ndarray) -> np.ndarray:
        tensor = np.array(tensor)
        tensor.flat[rng.randrange(tensor.size)] = value if tensor.dtype.kind == "f" else 10**6
        return tensor

    return change


def _cast(dtype: Any) -> Callable[[random.Random, np.ndarray], np.ndarray]:
    return lambda rng, tensor: tensor.astype(dtype)


_TENSOR_CHANGES: dict[str, Callable[[random.Random, np.ndarray], np.ndarray]] = {
    "of NaN": _filled(np.nan),
    "of 0": _filled(0.0),
    "of 1e30": _filled(1e30),
    "one NaN": _with_one(np.nan),
    "one infinite": _with_one(np.inf),
    "shorter": lambda rng, tensor: tensor[:-1],
    "longer": lambda rng, tensor: np.concatenate([tensor, tensor[:1]]),
    "empty": lambda rng, tensor: tensor[:0],
    "turned": lambda rng, tensor: np.ascontiguousarray(tensor.T),
    "one number": lambda rng, tensor: np.ascontiguousarray(tensor.reshape(-1)[:1].reshape(())),
    "flat": lambda rng, tensor: tensor.reshape(-1),
    "one axis more": lambda rng, tensor: tensor[None],
    "of 8 axes": lambda rng, tensor: tensor[(None,) * (8 - tensor.ndim)],
    "in 16 bits": _cast(ml_dtypes.bfloat16),
    "in 64 bits": _cast(np.float64),
    "in 8 bits": _cast(ml_dtypes.float8_e4m3fn),
    "whole": _cast(np.int32),
    "bytes": lambda rng, tensor: np.zeros(tensor.shape, np.uint8),
    "other numbers": lambda rng, tensor: np.ascontiguousarray(tensor[::-1]),
}


def change_the_names(rng: random.Random, folder: Path) -> str:
    """Tensors that are missing, unknown, or under each other's names."""
    tensors = _tensors(folder)
    name, kind = rng.choice(sorted(tensors)), rng.randrange(6)
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        other = rng.choice((f"{name}_", f"model.{name}", name.upper(), "", "a" * 1000))
        tensors[other] = tensors.pop(name)
    elif kind == 2:
        tensors[rng.choice(_FOREIGN)] = np.ones((3, 3), np.float32)
    else:  # those of one shape where there are some
        alike = [key for key in tensors if tensors[key].shape == tensors[name].shape]
        other = rng.choice(sorted(alike if len(alike) > 1 and kind < 5 else tensors))
        tensors[name], tensors[other] = tensors[other], tensors[name]
        name += f" and {other}"
    _store(folder, tensors)
    return f"{name} {kind}"


_FOREIGN = (
    "layers.5.self_attn.q_proj.weight",
    "layers.999999.mlp.up_proj.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.mtp_layers.1.input_proj.weight",
    "mask_hidden",
    "markov_head.gate_proj.weight",
    "embed_tokens.weight",
    "lm_head.weight",
    "confidence_head.proj.weight",
    "fc.weight_scale",
    "63.0.linear.weight",
    "d2t",
    "outside/weight",
)


def change_the_vocabulary(rng: random.Random, folder: Path) -> str:
    """Offsets of draft tokens that lead elsewhere: past the end, below 0, to one token twice."""
    tensors = _tensors(folder)
    d2t = np.array(tensors.get("d2t", np.zeros(20, np.int64)))
    kind, at = rng.randrange(7), rng.randrange(1, len(d2t))
    if kind == 0:
        d2t[at:] += rng.choice((61, 2**31, 2**62))
    elif kind == 1:
        d2t[:at] -= rng.choice((61, 2**31, 2**62))
    elif kind == 2:
        d2t[at] = d2t[at - 1] - 1
    elif kind == 3:
        d2t = rng.choice((d2t[:-1], d2t[None], d2t.astype(np.float32), d2t[:0]))
    elif kind == 4:  # of two tokens, which are no longer in order
        d2t[at], d2t[at - 1] = d2t[at - 1] - 1, d2t[at] + 1
    elif kind == 5:
        tensors["t2d"] = rng.choice((np.ones(61, bool), np.zeros(61, bool), np.ones(7, bool)))
    else:
        d2t = d2t.astype(np.uint64) + np.uint64(2**63)
    _store(folder, tensors | {"d2t": d2t})
    return f"{kind} {at}"


def change_a_key(rng: random.Random, folder: Path) -> str:
    """A key that drafters have gets a value of another kind or size."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    holder = raw.get("transformer_layer_config", raw) if rng.random() < 0.5 else raw
    key = rng.choice(sorted({*holder, *_KEYS}))
    value = rng.choice(_VALUES)
    holder[key] = json.loads("[" * value + "]" * value) if value in _DEPTHS else value
    dump(path, raw)
    return f"{key} {str(value)[:40] if value not in _DEPTHS else f'nested {value} deep'}"


_KEYS = (
    "architectures", "speculators_model_type", "model_type", "draft_vocab_size", "vocab_size",
    "target_hidden_size", "eagle_config", "eagle_aux_hidden_state_layer_ids", "rope_scaling",
    "rope_parameters", "layer_types", "sliding_window", "head_dim", "num_hidden_layers",
    "num_key_value_heads", "markov_rank", "block_size", "mask_token_id", "target_layer_ids",
    "aux_hidden_state_layer_ids", "dflash_config", "n_predict", "inner_dim", "tie_weights",
    "medusa_num_heads", "truncated_vocab_size", "num_nextn_predict_layers", "logit_scale",
    "pard_token", "quantization_config", "transformer_layer_config", "num_target_layers",
)  # fmt: skip
_DEPTHS = 5, 40
_VALUES = (
    *_DEPTHS, -1, 0, 1, 3, 4096, 2**31 - 1, 2**63, 10**40, float("nan"), float("inf"), -0.5,
    1e300, None, True, "", "eagle3", "\ud800", "a" * 10**4, [], {}, [None], [{}], [1] * 10**4,
    {"type": "yarn"}, {"a": {"b": {}}}, ["full_attention"] * 3, ["DFlashDraftModel"], [0, 1, 2],
)  # fmt: skip


class Counted:
    """Counts how often pickle reads one."""

    num_read = 0

    def __init__(self):
        self.value = 1

    def __setstate__(self, state: dict) -> None:
        Counted.num_read += 1


def store_a_pickle(rng: random.Random, folder: Path) -> str:
    """Weights that hold another object than tensors: alone, beside sound ones, or in their name."""
    content = pickle.dumps(Counted(), protocol=2)
    if rng.randrange(2):
        content = archive(content)  # as torch.save writes it
    kind = rng.randrange(4)
    name = rng.choice(("pytorch_model.bin", "medusa_lm_head.pt", "model.pth", "x.bin"))
    if kind == 0:
        (folder / WEIGHTS).unlink()
    elif kind == 1:
        name = WEIGHTS
    elif kind == 2:
        names = dict.fromkeys(_tensors(folder), name)
        dump(folder / f"{WEIGHTS}.index.json", {"weight_map": names})
    (folder / name).write_bytes(content)
    return f"{name} {kind}"


def _tensors(folder: Path) -> dict[str, np.ndarray]:
    return {name: np.array(tensor) for name, tensor in open_folder(folder).items()}


_CODES = {
    "float32": "F32", "float64": "F64", "int64": "I64", "int32": "I32", "bool": "BOOL",
    "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "uint8": "U8", "uint64": "U64",
}  # fmt: skip


def _store(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    header, data = {}, b""
    for name, tensor in tensors.items():
        offsets = [len(data), len(data) + tensor.nbytes]
        data += tensor.tobytes()
        header[name] = {
            "dtype": _CODES[str(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
    join(folder / WEIGHTS, header, data)


_CHANGES: tuple[Callable[[random.Random, Path], str], ...] = (
    change_a_config,
    change_a_config,
    change_a_key,
    change_a_key,
    change_a_key,
    change_a_tensor,
    change_a_tensor,
    change_a_tensor,
    change_the_names,
    change_the_names,
    change_the_vocabulary,
    change_a_header,
    change_offsets,
    change_the_header_length,
    change_bytes,
    change_the_file,
    give_a_key_twice,
    store_a_pickle,
)


class _Loaded(NamedTuple):
    name: str
    drafter: specjax.LoadedDrafter


def _kind_of(folder: Path) -> str:
    kinds = sorted(sound_folders())
    return kinds[int(folder.name) % len(kinds)]


def load(folder: Path) -> tuple[str, _Loaded | None]:
    """Loads the drafter of a folder for its target; returns what came of it.

    "loaded", or the message of a ValueError, FileNotFoundError or NotImplementedError, which names
    a file, a key or a tensor. Anything else is raised.
    """
    name = _kind_of(folder)
    try:
        drafter = specjax.load_drafter(folder, sound_folders()[name].target)
    except (ValueError, FileNotFoundError, NotImplementedError) as error:
        said = message_of(error)
        assert any(each in said for each in (str(folder), *_KEYS)), f"names nothing: {said}"
        return said, None
    return "loaded", _Loaded(name, drafter)


def check(loaded: _Loaded, drafts: bool) -> str:
    """Raises AssertionError unless a drafter that was loaded drafts validly.

    One that differs from the sound one drafts other tokens: the text is that of plain decoding all
    the same, not all drafts are accepted, and a warning says so if hardly one is.

    Args:
      drafts: whether texts are generated. Otherwise the state of the drafter is traced, and its
        weights are compared with those that its config needs.
    """
    assert not Counted.num_read, "a pickle was read"
    sound = _sound(loaded.name)
    if drafts:
        _draft_as_sound(loaded.name)
    if sound.spec == loaded.drafter.spec and _are_equal(sound.params, loaded.drafter.params):
        return "; as without the fault"
    _trace(loaded)
    if not drafts:
        return "; is another drafter"
    _generate(loaded)
    return "; drafts otherwise"


def _trace(loaded: _Loaded) -> None:
    config, drafter = sound_folders()[loaded.name].target.config, loaded.drafter
    drafter.check_params(config, jnp.float32)
    context = DrafterContext(
        target=config,
        num_speculative_tokens=2,
        dtype=jnp.dtype(jnp.float32),
        taps=drafter.spec.taps,
    )
    jax.eval_shape(lambda: drafter.spec.build(context).init(2, 32, 16, 4))


def _generate(loaded: _Loaded) -> None:
    """Raises AssertionError unless a text is right, and not all of its drafts are accepted."""
    target = sound_folders()[loaded.name].target
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        out = specjax.generate(
            target,
            [[1, 2, 3]],
            drafter=loaded.drafter,
            speculative_config={"policy": "fixed", "num_speculative_tokens": 2},
            sampling=SAMPLING,
        )
    assert out[0].token_ids == _plain(loaded.name)
    acceptance = out.stats.acceptance
    is_off = [text for text in map(str, (one.message for one in said)) if "turned off" in text]
    if is_off:  # a draft model, whose numbers are looked at
        assert "NaN" in is_off[0], is_off[0]
        return
    assert acceptance.num_drafted > 20
    assert acceptance.num_accepted < acceptance.num_drafted
    is_hard = acceptance.drafted_at[0] >= 24 and acceptance.accepted_at[0] == 0
    assert not is_hard or any("hardly a draft" in str(one.message) for one in said)


@functools.cache
def _draft_as_sound(name: str) -> None:
    _generate(_Loaded(name, _sound(name)))


@functools.cache
def _plain(name: str) -> list[int]:
    target = sound_folders()[name].target
    return specjax.generate(target, [[1, 2, 3]], sampling=SAMPLING)[0].token_ids


@functools.cache
def _sound(name: str) -> specjax.LoadedDrafter:
    """Returns the drafter of the folder without faults."""
    folder = Path(sys.argv[1]) / name
    folder.mkdir(parents=True)
    sound_folders()[name].write(folder)
    return specjax.load_drafter(folder, sound_folders()[name].target)


def _are_equal(ours: Any, theirs: Any) -> bool:
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def main() -> None:
    for name in sound_folders():  # so that what jax takes once is not counted
        _trace(_Loaded(name, _sound(name)))
    serve(make_folder, load, functools.partial(check, drafts="--drafts" in sys.argv))


if __name__ == "__main__":
    main()
