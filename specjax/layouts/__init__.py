"""Layouts of weights: the tables that lead from the trees of trainers to specjax's, and back.

docs/weights-layout.md describes specjax's own layout and the named ones.
"""

from specjax.layouts.named import linen as linen
from specjax.layouts.named import maxtext as maxtext
from specjax.layouts.named import nnx as nnx
from specjax.layouts.named import tunix as tunix
from specjax.layouts.operations import Heads as Heads
from specjax.layouts.operations import Interleaved as Interleaved
from specjax.layouts.operations import Offset as Offset
from specjax.layouts.operations import Operation as Operation
from specjax.layouts.operations import Scaled as Scaled
from specjax.layouts.operations import Transposed as Transposed
from specjax.layouts.tables import Layout as Layout
from specjax.layouts.tables import Place as Place
