"""Bytes that each TPU kernel moves in a step of rows of one context. No jax.

A kernel reads what its arguments at run time say: which pages a row has, which slots are written.
So its bytes are formulas, from the sizes of its operands and of the step.
"""

from __future__ import annotations

import dataclasses
import re

from tools.hlo_program import ArrayShape
from tools.program_traffic import Kernel, Moved

_TILE_BYTES = 32  # of a column of a tile in memory: 16 sublanes of bfloat16
_LAYER = re.compile(r"cache\.pages\[(\d+)\]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelStep:
    """The sizes that a step's kernels work on.

    Attributes:
      rows: rows, all of them active.
      nodes: tokens of each row that are verified, the root included.
      context: tokens that each row has.
      layer_windows: of the target, as in its config.
    """

    rows: int
    nodes: int
    context: int
    layer_windows: tuple[int | None, ...] = ()

    def bytes(self, kernel: Kernel) -> Moved:
        """Returns the bytes that a kernel moves.

        Raises:
          KeyError: the kernel is not known.
        """
        formulas = {
            "tree_attention": self._attention,
            "write_kv": self._write,
            "move_kv": self._write,
            "read_kv": self._read,
            "seeded_sample": lambda kernel: kernel.rest,
        }
        return formulas[kernel.name](kernel)

    def _attention(self, kernel: Kernel) -> Moved:
        """Every page of a row once; queries and results as they lie.

        A row ends in the middle of a page, and so does what lies before a window: the mean of
        rows whose lengths are spread about the context.
        """
        pages = _pages(kernel)
        half_page = (pages[0].dims[2] - 1) / 2
        window, first = self._window(kernel), 0.0
        if window is not None:
            first = max(self.context - window + 1 - half_page, 0)
        ends = self.context + self.nodes + half_page
        read = self.rows * (ends - first) * sum(map(_token_bytes, pages))
        others = kernel.rest
        whole = sum(shape.main_bytes for shape in pages)
        return Moved(others.read - whole + read, others.written)

    def _write(self, kernel: Kernel) -> Moved:
        """Stripes of neighbouring tokens are read, changed and written."""
        stripes = self._stripe_bytes(kernel)
        return Moved(kernel.rest.read + stripes, kernel.rest.written + stripes)

    def _read(self, kernel: Kernel) -> Moved:
        whole = sum(shape.main_bytes for shape in _pages(kernel))
        stripes = self._stripe_bytes(kernel)
        return Moved(kernel.rest.read - whole + stripes, kernel.rest.written)

    def _stripe_bytes(self, kernel: Kernel) -> float:
        """Bytes of the stripes that new tokens lie in, at a mean place in their first one."""
        pages = _pages(kernel)
        tokens = _TILE_BYTES // _itemsize(pages[0])
        stripes = 1 + (self.nodes - 1) / tokens
        return self.rows * stripes * tokens * sum(map(_token_bytes, pages))

    def _window(self, kernel: Kernel) -> int | None:
        origins = (one for one in kernel.origins if isinstance(one, str))
        layer = next(filter(None, map(_LAYER.search, origins)), None)
        if layer is None or not self.layer_windows:
            return None
        return self.layer_windows[int(layer.group(1))]


def _pages(kernel: Kernel) -> list[ArrayShape]:
    """Returns the operands that are arrays of pages: the last ones, all of one shape."""
    last = kernel.operands[-1]
    return [shape for shape in kernel.operands if shape == last]


def _token_bytes(pages: ArrayShape) -> int:
    _, kv_heads, _, width = pages.dims
    return kv_heads * width * _itemsize(pages)


def _itemsize(shape: ArrayShape) -> int:
    return dataclasses.replace(shape, dims=(), tile=(), order=()).num_bytes
