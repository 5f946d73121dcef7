"""Writes folders of heads over a target, for tests that read them."""

import json

import jax
import numpy as np

NAMES = {"float32": "F32", "int64": "I64", "bool": "BOOL", "bfloat16": "BF16"}


def write(folder, raw, tensors):
    header, data = {}, b""
    for name, tensor in tensors.items():
        offsets = [len(data), len(data) + tensor.nbytes]
        data += tensor.tobytes()
        kind = NAMES[str(tensor.dtype)]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def random_tensors(leaves, seed=0):
    """Returns random tensors by the names of a file; `leaves` has a Weight at each leaf."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape).astype(np.float32)
        for leaf in jax.tree.leaves(leaves)
        for name, shape in leaf.source.tensors()
    }


def vocabulary_maps(count, of, seed=0):
    """Returns d2t and t2d of a head that says `count` of the target's tokens."""
    ids = np.sort(np.random.default_rng(seed).choice(of, count, replace=False))
    return {"d2t": ids - np.arange(count), "t2d": np.isin(np.arange(of), ids)}


def without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def put(name, change):
    return lambda tensors: tensors | {name: change(tensors.get(name))}
