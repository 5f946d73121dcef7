"""Block sizes of the TPU kernel: measured on a device, or a default.

`python -m tools.attention_speed --tune` measures and writes the table,
block_sizes.json: a list of documents like `Entry`. Results differ by the order of sums alone.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

PATH = Path(__file__).with_suffix(".json")


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Block sizes of one call.

    Attributes:
      queries: most new tokens of a row that share one read of its pages.
      tile_tokens: keys that are copied and multiplied at once; a multiple of the page size,
        or one page.
    """

    # Nothing was measured on a TPU yet. `bundles` compiled these for the tables of
    # docs/benchmarks/kernels.md: 512 keys hide the latency of their own products where a chip has
    # two key heads. A tile is as wide whatever the number of queries is, so that sums of keys are
    # in one order whether a step drafts or not.
    queries: int = 128
    tile_tokens: int = 512


DEFAULT = BlockSizes()
# With two or three query heads per key head, 128 tokens are one step of the kernel on a matrix unit
# of 256 x 256, with nothing beside its softmax; 256 are two. See docs/benchmarks/kernels.md.
OF_FEW_HEADS = BlockSizes(queries=256)
FEW_HEADS = (2, 3)
# Of heads that fill such a matrix unit, tiles of 1,024 keys take fewer bundles per key, whether a
# step decodes or reads a prompt. Smaller VMEM, or more numbers of all key heads of a token, would
# leave room only for smaller blocks of queries beside them; so do numbers of four bytes.
OF_FEW_LARGE_HEADS = BlockSizes(queries=256, tile_tokens=1024)
LARGE_HEAD_DIM, LARGE_VMEM_BYTES, MOST_KEY_NUMBERS = 256, 128 << 20, 8 * 256
CANDIDATES = tuple(BlockSizes(q, t) for q in (16, 32, 64, 128, 256) for t in (128, 256, 512, 1024))


@dataclasses.dataclass(frozen=True)
class _Core:
    """What the kernel's sizes depend on."""

    cores: int  # that share the blocks of a call
    vmem_bytes: int  # of a core
    is_wide: bool = False  # a matrix unit of 256 x 256, not 128 x 128


# By what jax calls a device; sizes as in jax's own pltpu.get_tpu_info (jax 0.10.2).
_CORES = {
    "TPU v4": _Core(2, 16 << 20),
    "TPU v5 lite": _Core(1, 128 << 20),
    "TPU v5": _Core(2, 64 << 20),
    "TPU v5p": _Core(2, 64 << 20),
    "TPU v6 lite": _Core(1, 128 << 20, is_wide=True),
    "TPU7x": _Core(1, 64 << 20, is_wide=True),
}
_UNKNOWN = _Core(2, 16 << 20)  # the least of all generations; two cores are right for one as well
_SPARE_BYTES = 2 << 20  # for what the compiler itself keeps in VMEM


def cores_of(device_kind: str | None) -> int:
    """Returns how many cores of a device share the blocks of a call."""
    return _CORES.get(device_kind or "", _UNKNOWN).cores


def vmem_budget(device_kind: str | None) -> int:
    """Returns the bytes of VMEM that a call may keep there: half of a large one.

    XLA uses the rest to copy weights ahead of other operations.
    """
    whole = _CORES.get(device_kind or "", _UNKNOWN).vmem_bytes
    return max(whole // 2, _UNKNOWN.vmem_bytes - _SPARE_BYTES)


def vmem_limit_bytes(device_kind: str | None, needed: int) -> int:
    """Returns the limit to compile a call with that keeps so many bytes in VMEM."""
    whole = _CORES.get(device_kind or "", _UNKNOWN).vmem_bytes
    # A quarter for spilled registers, and for what tiles and blocks take beyond their own bytes.
    return min(whole, max(_UNKNOWN.vmem_bytes, needed + needed // 4 + _SPARE_BYTES))


@dataclasses.dataclass(frozen=True)
class Entry:
    """The fastest of CANDIDATES for a shape on a device."""

    device_kind: str  # as jax names it
    head_dim: int  # of a line, where heads lie in lanes
    group: int  # query heads of a key head
    max_tokens_per_row: int
    rows: int
    context: int  # tokens of each row
    sizes: BlockSizes


def choose(
    device_kind: str | None,
    head_dim: int,
    group: int,
    max_tokens_per_row: int,
    rows: int,
    context: int,
    *,
    kv_heads: int,
) -> BlockSizes:
    """Returns the sizes of the device's nearest entry, or the default of its kind if it has none.

    Entries are compared by tokens per row, then by rows, then by context.
    """
    own = [
        entry
        for entry in table()
        if (entry.device_kind, entry.head_dim, entry.group) == (device_kind, head_dim, group)
    ]
    distance = lambda entry: (
        abs(entry.max_tokens_per_row - max_tokens_per_row),
        abs(entry.rows - rows),
        abs(entry.context - context),
    )
    if own:
        return min(own, key=distance).sizes
    core = _CORES.get(device_kind or "", _UNKNOWN)
    if not core.is_wide or group not in FEW_HEADS:
        return DEFAULT
    has_room = core.vmem_bytes >= LARGE_VMEM_BYTES and kv_heads * head_dim <= MOST_KEY_NUMBERS
    return OF_FEW_LARGE_HEADS if has_room and head_dim >= LARGE_HEAD_DIM else OF_FEW_HEADS


@functools.cache
def table() -> tuple[Entry, ...]:
    """Returns the entries of block_sizes.json."""
    documents = json.loads(PATH.read_text(encoding="utf-8"))
    return tuple(
        Entry(**{**document, "sizes": BlockSizes(**document["sizes"])}) for document in documents
    )


def write(entries: list[Entry], path: Path = PATH) -> None:
    """Writes entries, replacing those of the same shapes and devices."""
    shape = lambda entry: dataclasses.astuple(entry)[:-1]
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    measured = [dataclasses.asdict(entry) for entry in entries]
    names = [field.name for field in dataclasses.fields(Entry)][:-1]
    new = {shape(entry) for entry in entries}
    kept = [one for one in before if tuple(one[name] for name in names) not in new]
    path.write_text(json.dumps([*kept, *measured], indent=1) + "\n", encoding="utf-8")
