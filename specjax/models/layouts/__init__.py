"""Layouts of weights: the tables that lead from the trees of trainers to specjax's, and back.

docs/weights-layout.md describes specjax's own layout and the named ones.
"""

from specjax.models.layouts.named import linen as linen
from specjax.models.layouts.named import maxtext as maxtext
from specjax.models.layouts.named import nnx as nnx
from specjax.models.layouts.named import tunix as tunix
from specjax.models.layouts.operations import Heads as Heads
from specjax.models.layouts.operations import Interleaved as Interleaved
from specjax.models.layouts.operations import Offset as Offset
from specjax.models.layouts.operations import Operation as Operation
from specjax.models.layouts.operations import Scaled as Scaled
from specjax.models.layouts.operations import Transposed as Transposed
from specjax.models.layouts.tables import Layout as Layout
from specjax.models.layouts.tables import Place as Place
