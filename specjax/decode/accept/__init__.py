"""Verification rules: which draft tokens are accepted, and the token after them. One per file.

| rule | drafts | output | noise |
|---|---|---|---|
| `accept_by_equality` | chains, trees | what the target chooses | in the choices |
| `accept_by_rejection` | chains, trees | in law | f32[rows, num_nodes, 1 + num_draws] |
| `accept_by_blocks` | chains | in law | f32[rows, num_nodes, 1 + num_draws] |
| `accept_by_traversal` | chains, trees | in law | f32[rows, num_nodes, 1 + num_draws] |
| `accept_leniently` | chains, trees | lossy | f32[rows, num_nodes, 1 + num_draws] |
| `accept_typical` | chains, trees | lossy | in the choices |
| `accept_synthetic` | chains, trees | made up | f32[rows, max_depth] |

`num_draws(vocab)` is how many uniform numbers it takes to draw one token.
Rules are pure functions of arrays, and rows are independent: NaN in one row changes no other.
"""

from specjax.decode.accept.block import accept_by_blocks as accept_by_blocks
from specjax.decode.accept.drawing import draw_token as draw_token
from specjax.decode.accept.drawing import num_draws as num_draws
from specjax.decode.accept.equality import accept_by_equality as accept_by_equality
from specjax.decode.accept.lenient import accept_leniently as accept_leniently
from specjax.decode.accept.rejection import accept_by_rejection as accept_by_rejection
from specjax.decode.accept.synthetic import accept_synthetic as accept_synthetic
from specjax.decode.accept.traversal import accept_by_traversal as accept_by_traversal
from specjax.decode.accept.typical import accept_typical as accept_typical
