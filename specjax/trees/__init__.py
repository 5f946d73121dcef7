"""Draft trees: their derived properties, and ways to choose their shape.

draft_tree      depths, ancestor bits, paths, leaves of any tree
static_shapes   shapes fixed beforehand; best_static: the best one for measured acceptance
expanding       trees grown by a draft model, depth by depth
merging         a tree of several continuations of one text, with shared beginnings
"""

from specjax.trees.best_static import BestTree as BestTree
from specjax.trees.best_static import best_tree as best_tree
from specjax.trees.best_static import expected_committed as expected_committed
from specjax.trees.draft_tree import NO_NODE as NO_NODE
from specjax.trees.draft_tree import GrownTree as GrownTree
from specjax.trees.draft_tree import ancestor_bits as ancestor_bits
from specjax.trees.draft_tree import chain as chain
from specjax.trees.draft_tree import children as children
from specjax.trees.draft_tree import from_parents as from_parents
from specjax.trees.draft_tree import is_leaf as is_leaf
from specjax.trees.draft_tree import path_token_ids as path_token_ids
from specjax.trees.draft_tree import paths as paths
from specjax.trees.draft_tree import sibling_ranks as sibling_ranks
from specjax.trees.merging import merge as merge
from specjax.trees.static_shapes import TreeShape as TreeShape
from specjax.trees.static_shapes import from_rank_paths as from_rank_paths
from specjax.trees.static_shapes import from_widths as from_widths
