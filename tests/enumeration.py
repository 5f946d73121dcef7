"""The law of what a verification rule emits, integrated exactly.

A rule is a function of uniform noise. With all else fixed it decides about one node
after the other, each time by whether a number of the noise is below a threshold, and
then draws a token by further numbers, each of which cuts (0, 1) into one piece per part
of the vocabulary that is left. So the law of a step is known when, for every draft,
every threshold and every end of a piece is: they are found by bisection of the rule
itself, down to the spacing of float32, and the rule is then compared with what they
foretell at random noise, whole. A rule that depends on the noise in any other way
fails there.

Steps compose: the joint law of several tokens is that of a step from the empty prefix,
then of a step with a draft and noise of its own from whatever prefix that left.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode.accept import drawing
from specjax.types import Acceptance, DraftTree, Proposal

# A threshold is known to 6e-8, the spacing of float32 below 1.
LAW_TOLERANCE = 1e-6
NUM_HALVINGS = 25
BATCH = 4096  # rows of every call, so that a rule is compiled once per shape
EDGE = 1e-5  # this near to a threshold nothing is foretold
NOT_HERE = -1
SURELY, NEVER = np.float32(1e-30), np.float32(1 - 2.0**-24)

Prefix = tuple[int, ...]
Law = Callable[[Prefix], np.ndarray]  # the probabilities of the token after a prefix


@functools.cache
def _dirichlet(seed: int, vocab: int, sharpness: float, prefix: Prefix) -> np.ndarray:
    rng = np.random.default_rng([seed, vocab, len(prefix), *prefix])
    return rng.dirichlet([sharpness] * vocab)


@functools.cache
def random_law(seed: int, vocab: int = 3, *, sharpness: float = 1.0) -> Law:
    """Returns a law that depends on the whole prefix."""
    return functools.partial(_dirichlet, seed, vocab, sharpness)


def joint_law(law: Law, length: int) -> np.ndarray:
    """Returns the probability of every sequence of so many tokens."""
    vocab = len(law(()))
    joint = np.ones([vocab] * length)
    for tokens in itertools.product(range(vocab), repeat=length):
        for place, token in enumerate(tokens):
            joint[tokens] *= law(tokens[:place])[token]
    return joint


@dataclasses.dataclass(frozen=True)
class Shape:
    """What follows what in a draft; a chain is given to rules as a chain unless is_tree."""

    parents: tuple[int, ...]
    is_tree: bool = True

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @functools.cached_property
    def depths(self) -> list[int]:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def path(self, node: int) -> list[int]:
        """Returns the nodes after the root on the way to a node, itself included."""
        path = []
        while node:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def earlier_siblings(self, node: int) -> list[int]:
        return [other for other in self.children(self.parents[node]) if 0 < other < node]

    def tried_before(self, node: int) -> list[int]:
        """Returns the earlier siblings of a node and of each of its ancestors."""
        return [other for at in self.path(node) for other in self.earlier_siblings(at)]

    def prefix(self, tokens: Sequence[int], node: int) -> Prefix:
        return tuple(tokens[at - 1] for at in self.path(node))


def chain(depth: int) -> Shape:
    return Shape(tuple(range(-1, depth)), is_tree=False)


def tree(*branching: int) -> Shape:
    """Returns the tree whose nodes at depth d have branching[d] children, by depth."""
    parents, level = [-1], [0]
    for width in branching:
        start = len(parents)
        parents += [node for node in level for _ in range(width)]
        level = list(range(start, len(parents)))
    return Shape(tuple(parents))


@dataclasses.dataclass(frozen=True)
class Drafted:
    """A draft and how likely the drafter makes it."""

    probability: float
    token_ids: tuple[int, ...]
    num_tokens: int
    probs: np.ndarray  # [num_drafts, vocab], what it says it drew node j's children from


Drafter = Callable[[Shape, Prefix], Iterable[Drafted]]


def draws_without_replacement(law: np.ndarray, drawn: Sequence[int]) -> np.ndarray:
    """Returns the law of the next draw; uniform over the rest when none is likely."""
    left = law.copy()
    left[list(drawn)] = 0
    if left.sum() == 0:
        left = np.ones_like(law)
        left[list(drawn)] = 0
    return left / left.sum() if drawn else left


def probs_of(shape: Shape, context: Prefix, tokens: Sequence[int], law: Law):
    """Returns law at every node, [num_nodes, vocab]."""
    nodes = range(shape.num_nodes)
    return np.array([law(context + shape.prefix(tokens, node)) for node in nodes])


@functools.cache
def every_draft(
    shape: Shape, context: Prefix, law: Law, with_replacement: bool = False
) -> list[tuple[float, tuple[int, ...]]]:
    """Returns what a drafter that samples may draw, and how likely that is."""
    vocab, drafts = len(law(())), []
    for tokens in itertools.product(range(vocab), repeat=shape.num_nodes - 1):
        probability = 1.0
        for node in range(1, shape.num_nodes):
            q = law(context + shape.prefix(tokens, shape.parents[node]))
            drawn = [tokens[other - 1] for other in shape.earlier_siblings(node)]
            if not with_replacement:
                q = draws_without_replacement(q, drawn)
            probability *= q[tokens[node - 1]]
            if probability == 0:
                break
        else:
            drafts.append((probability, tokens))
    return drafts


def sampler(
    law: Law,
    *,
    num_tokens: Callable[[Shape, Prefix, tuple[int, ...]], int] | int | None = None,
    with_replacement: bool = False,
) -> Drafter:
    """Returns the drafter that samples, of which num_tokens stand; all by default."""

    def draft(shape: Shape, context: Prefix) -> Iterable[Drafted]:
        drafts = every_draft(shape, context, law, with_replacement)
        for probability, tokens in drafts:
            stand = num_tokens
            if callable(stand):
                stand = stand(shape, context, tokens)
            stand = shape.num_nodes - 1 if stand is None else stand
            probs = probs_of(shape, context, tokens, law)[:-1]
            yield Drafted(probability, tokens, stand, probs)

    return draft


# What is decided before what, and hence what has been decided when it is node v's turn,
# and when v is where the step ends: (nodes accepted, nodes rejected).


def top_down(shape: Shape, node: int, *, is_last: bool) -> tuple[list[int], list[int]]:
    """From the root to the leaves, siblings in order."""
    rejected = shape.tried_before(node)
    if is_last:
        return shape.path(node), rejected + shape.children(node)
    return shape.path(node)[:-1], rejected


def bottom_up(shape: Shape, node: int, *, is_last: bool) -> tuple[list[int], list[int]]:
    """From the first leaf to the root, a node when it has no children left."""

    def visited(at: int) -> list[int]:
        return [n for child in shape.children(at) for n in visited(child)] + [at]

    order = visited(0)
    before = order[: order.index(node)]
    return ([node] if is_last and node else []), before


class _Cases:
    """Every (context, draft) as arrays, and a rule to run on them."""

    def __init__(self, rule, shape: Shape, target: Law, drafter: Drafter, contexts):
        self.shape, self.rule = shape, rule
        drafts = [(at, draft) for at in contexts for draft in drafter(shape, at)]
        self.contexts = [context for context, _ in drafts]
        index = {context: place for place, context in enumerate(contexts)}
        self.context_ids = np.array([index[context] for context in self.contexts])
        self.probability = np.array([draft.probability for _, draft in drafts])
        num_drafts = shape.num_nodes - 1
        self.tokens = np.array([draft.token_ids for _, draft in drafts], np.int32)
        self.tokens = self.tokens.reshape(len(drafts), num_drafts)
        self.num_tokens = np.array([draft.num_tokens for _, draft in drafts], np.int32)
        self.target_probs = np.array(
            [probs_of(shape, at, draft.token_ids, target) for at, draft in drafts],
            np.float32,
        )
        self.vocab = self.target_probs.shape[2]
        self.draft_probs = np.array([draft.probs for _, draft in drafts], np.float32)
        self.draft_probs = self.draft_probs.reshape(-1, num_drafts, self.vocab)
        self.noise_shape = noise_shape(shape, self.vocab)

    def run(self, cases: np.ndarray, noise: np.ndarray, *, check: bool = False):
        """Returns the last accepted node and the token after it, of each case and its noise.

        Args:
          check: whether the whole of what the rule returns must agree with them.
        """
        lasts, tokens = [], []
        for start in range(0, len(cases), BATCH):
            part = cases[start : start + BATCH]
            padded = np.resize(part, BATCH)
            part_noise = noise[start : start + BATCH]
            acceptance = self.rule(
                np.resize(part_noise, (BATCH, *noise.shape[1:])),
                make_proposal(
                    self.shape,
                    self.tokens[padded],
                    self.draft_probs[padded],
                    self.num_tokens[padded],
                ),
                self.target_probs[padded],
            )
            counts, row = np.asarray(acceptance.num_accepted), np.arange(BATCH)
            last = counts
            if acceptance.nodes is not None:
                root = np.zeros((BATCH, 1), int)
                last = np.concatenate([root, acceptance.nodes], axis=1)[row, counts]
            if check:
                self._check_path(padded, acceptance, last)
            lasts.append(last[: len(part)])
            tokens.append(np.asarray(acceptance.token_ids)[row, counts][: len(part)])
        return np.concatenate(lasts), np.concatenate(tokens)

    def _check_path(self, cases: np.ndarray, acceptance: Acceptance, last) -> None:
        """Asserts that the accepted nodes and tokens are those of the path to the last."""
        paths = [self.shape.path(node) for node in range(self.shape.num_nodes)]
        assert np.all(last <= self.num_tokens[cases])
        token_ids, counts = map(np.asarray, acceptance[:2])
        for node, path in enumerate(paths):
            here = last == node
            assert np.all(counts[here] == len(path))
            nodes = np.array(path, int)
            drafted = self.tokens[cases[here]][:, nodes - 1]
            assert np.array_equal(token_ids[here, : len(path)], drafted)
            if acceptance.nodes is not None:
                given = np.asarray(acceptance.nodes)[here, : len(path)]
                assert np.all(given == nodes[None, :])

    def alike(self, nodes: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns one case of each kind that the tokens of `nodes` make, and each case's kind."""
        nodes = sorted(nodes)
        keys = np.column_stack(
            [self.context_ids, self.num_tokens, self.tokens[:, [n - 1 for n in nodes]]]
        )
        _, first, kind = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        return first, kind.reshape(-1)


def noise_shape(shape: Shape, vocab: int) -> tuple[int, int]:
    """Returns that of a row's noise under the rules that compare laws."""
    return shape.num_nodes, 1 + drawing.num_draws(vocab)


def make_proposal(shape: Shape, tokens, probs=None, num_tokens=None) -> Proposal:
    """Returns the proposal of rows that share a shape; all tokens stand by default."""
    tokens = np.asarray(tokens, np.int32)
    rows = tokens.shape[0]
    topology = None
    if shape.is_tree:
        topology = DraftTree(
            parents=np.tile(np.int32(shape.parents), (rows, 1)),
            depths=np.tile(np.int32(shape.depths), (rows, 1)),
            max_depth=max(shape.depths),
        )
    if num_tokens is None:
        num_tokens = [shape.num_nodes - 1] * rows
    return Proposal(
        token_ids=jnp.asarray(tokens),
        num_tokens=jnp.asarray(num_tokens, jnp.int32),
        probs=None if probs is None else jnp.asarray(probs, jnp.float32),
        tree=topology,
    )


def _relevant(shape: Shape, order, node: int) -> set[int]:
    """Returns the nodes whose tokens may matter for a decision at a node, or for its coming."""
    accepted, rejected = order(shape, node, is_last=True)
    nodes = {*accepted, *rejected, *shape.path(node), *shape.children(node)}
    return nodes | {other for at in nodes for other in shape.path(at)}


@dataclasses.dataclass(frozen=True)
class _Jobs:
    """Bisections that run side by side: of one case each, at one node."""

    kinds: list[np.ndarray]  # by node, the place of each case's job among all
    cases: np.ndarray  # [num_jobs]
    nodes: np.ndarray  # [num_jobs]
    noise: np.ndarray  # [num_jobs, num_nodes, noise per node], all but what is sought

    def of_cases(self, found: np.ndarray) -> np.ndarray:
        """Returns what was found for every case and node, [cases, nodes, ...]."""
        return np.stack([found[kind] for kind in self.kinds], axis=1)


def _jobs(cases: _Cases, order, nodes: Iterable[int], *, is_last: bool) -> _Jobs:
    """Returns the jobs of these nodes, with all that comes before them decided."""
    kinds, which, at, noise, num_jobs = [], [], [], [], 0
    for node in nodes:
        first, kind = cases.alike(_relevant(cases.shape, order, node))
        kinds.append(num_jobs + kind)
        num_jobs += len(first)
        which.append(first)
        at.append(np.full(len(first), node))
        decided = order(cases.shape, node, is_last=is_last)
        noise.append(np.tile(_forced(cases, *decided), (len(first), 1, 1)))
    return _Jobs(kinds, *map(np.concatenate, (which, at, noise)))


def _bisect(is_below, low: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns neighbours between low and 1, up to the first of which is_below holds."""
    high = np.ones_like(low)
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        holds = is_below(middle)
        low, high = np.where(holds, middle, low), np.where(holds, high, middle)
    return low, high


def _thresholds(cases: _Cases, order) -> np.ndarray:
    """Returns below which noise each node stands, [cases, num_nodes - 1]."""
    num_nodes = cases.shape.num_nodes
    if num_nodes == 1:
        return np.zeros((len(cases.tokens), 0))
    jobs = _jobs(cases, order, range(1, num_nodes), is_last=False)
    is_through = np.eye(num_nodes, dtype=bool)
    for node in range(num_nodes):
        is_through[cases.shape.path(node), node] = True

    def does_stand(draw: np.ndarray) -> np.ndarray:
        noise = jobs.noise.copy()
        noise[np.arange(len(draw)), jobs.nodes - 1, 0] = draw
        last, _ = cases.run(jobs.cases, np.clip(noise, SURELY, NEVER))
        return is_through[jobs.nodes, last]

    low, high = _bisect(does_stand, np.zeros(len(jobs.cases), np.float32))
    return jobs.of_cases((low.astype(float) + high) / 2)


def _is_as(run, token: np.ndarray, draw: np.ndarray) -> np.ndarray:
    return run(draw) == token


class _Pieces:
    """How the draws of a token cut their (0, 1): which piece leads where.

    The pieces of a draw are those of each piece of the draw before it, in turn.
    """

    def __init__(self, cases: _Cases, order):
        num_nodes, per_node = cases.noise_shape
        jobs = _jobs(cases, order, range(num_nodes), is_last=True)
        self.most = most = min(drawing.WAYS, cases.vocab)
        self.ends = []  # by draw, f[cases, num_nodes, pieces before, most]
        draws = np.full((len(jobs.cases), 1, per_node - 1), 0.5, np.float32)
        for place in range(per_node - 1):
            ends, inside = [], []
            low = np.full(draws.shape[:2], SURELY)
            for _ in range(most):
                run = functools.partial(self._run, cases, jobs, draws, place)
                below, above = _bisect(functools.partial(_is_as, run, run(low)), low)
                # 1 itself is no draw: a piece that goes on to the last one ends there.
                end = np.where(below >= NEVER, 1, (below.astype(float) + above) / 2)
                inside.append((low + below) / 2)
                ends.append(end)
                low = np.minimum(above, NEVER)
            found = np.stack(ends, axis=2)
            assert np.all(found[:, :, -1] == 1), "more pieces than ways"
            self.ends.append(jobs.of_cases(found))
            draws = np.repeat(draws, most, axis=1)
            draws[:, :, place] = np.stack(inside, axis=2).reshape(draws.shape[:2])
        self.tokens = jobs.of_cases(self._run(cases, jobs, draws, 0, draws[:, :, 0]))

    @staticmethod
    def _run(cases, jobs: _Jobs, draws: np.ndarray, place: int, draw: np.ndarray):
        """Returns the token after each job's node, [num_jobs, pieces], where it ends there."""
        num_jobs, num_pieces = draw.shape
        job = np.repeat(np.arange(num_jobs), num_pieces)
        noise = jobs.noise[job]
        nodes = jobs.nodes[job]
        each = np.arange(len(job))
        noise[each, nodes, 1:] = draws.reshape(len(job), -1)
        noise[each, nodes, 1 + place] = draw.reshape(-1)
        last, token = cases.run(jobs.cases[job], np.clip(noise, SURELY, NEVER))
        return np.where(last == nodes, token, NOT_HERE).reshape(num_jobs, num_pieces)

    def token_probs(self, vocab: int) -> np.ndarray:
        """Returns [cases, num_nodes, vocab]."""
        chance = np.ones((*self.tokens.shape[:2], 1))
        for ends in self.ends:
            width = np.diff(np.maximum.accumulate(ends, axis=3), axis=3, prepend=0)
            chance = (chance[..., None] * width).reshape(*chance.shape[:2], -1)
        is_token = self.tokens[..., None] == np.arange(vocab)
        return np.sum(chance[..., None] * is_token, axis=2)

    def foretell(self, which: np.ndarray, node: int, draws: np.ndarray):
        """Returns the token after a node for draws [n, draws], and which lie on an end."""
        piece, is_on_edge = np.zeros(len(which), int), np.zeros(len(which), bool)
        for place, ends in enumerate(self.ends):
            difference = ends[which, node, piece] - draws[:, place : place + 1]
            is_on_edge |= np.any(np.abs(difference) < EDGE, axis=1)
            past = np.minimum(np.sum(difference < 0, axis=1), self.most - 1)
            piece = self.most * piece + past
        return self.tokens[which, node, piece], is_on_edge


def _forced(cases: _Cases, accepted: list[int], rejected: list[int]) -> np.ndarray:
    """Returns a row's noise under which these decisions are made where possible."""
    noise = np.full(cases.noise_shape, 0.5, np.float32)
    noise[[node - 1 for node in accepted], 0] = SURELY
    noise[[node - 1 for node in rejected], 0] = NEVER
    return noise


def _check_at_random(
    cases: _Cases, accept: np.ndarray, pieces: _Pieces, order, num_draws: int
) -> None:
    """Asserts that the thresholds foretell what the rule does, whatever the noise."""
    rng = np.random.default_rng(0)
    shape = cases.shape
    which = np.repeat(np.arange(len(cases.tokens)), num_draws)
    noise = rng.uniform(size=(len(which), *cases.noise_shape)).astype(np.float32)
    noise = np.clip(noise, SURELY, NEVER)
    last, token = cases.run(which, noise, check=True)
    is_on_edge = np.zeros(len(which), bool)
    expected_last = np.full(len(which), -1)
    expected_token = np.full(len(which), -1)
    for node in range(shape.num_nodes):
        accepted, rejected = order(shape, node, is_last=True)
        is_here = np.ones(len(which), bool)
        for nodes, wanted in ((accepted, True), (rejected, False)):
            for other in nodes:
                difference = accept[which, other - 1] - noise[:, other - 1, 0]
                is_here &= (difference > 0) == wanted
                is_on_edge |= np.abs(difference) < EDGE
        foretold, is_near = pieces.foretell(which, node, noise[:, node, 1:])
        is_on_edge |= is_here & is_near
        expected_last[is_here] = node
        expected_token[is_here] = foretold[is_here]
    agrees = (last == expected_last) & (token == expected_token)
    assert np.all(agrees | is_on_edge), "the rule uses its noise in another way"
    assert np.mean(is_on_edge) < 0.01


def step_laws(
    rule, shape: Shape, order, target: Law, drafter: Drafter, contexts: Sequence[Prefix]
) -> dict[Prefix, dict[Prefix, float]]:
    """Returns the law of what one step emits, for every prefix that it may start from.

    Args:
      rule: compiled; noise, proposal and target_probs to an Acceptance.
      order: `top_down` or `bottom_up`, the order in which the rule decides about nodes.
    """
    cases = _Cases(rule, shape, target, drafter, contexts)
    accept, pieces = _thresholds(cases, order), _Pieces(cases, order)
    num_draws = max(2, 512 // len(cases.tokens))
    _check_at_random(cases, accept, pieces, order, num_draws)
    laws: dict[Prefix, dict[Prefix, float]] = {context: {} for context in contexts}
    token_probs = pieces.token_probs(cases.vocab)
    for node in range(shape.num_nodes):
        accepted, rejected = order(shape, node, is_last=True)
        chance = cases.probability.copy()
        chance *= np.prod(accept[:, [other - 1 for other in accepted]], axis=1)
        chance *= np.prod(1 - accept[:, [other - 1 for other in rejected]], axis=1)
        for case in np.flatnonzero(chance > 0):
            law = laws[cases.contexts[case]]
            path = shape.prefix(cases.tokens[case].tolist(), node)
            for token, prob in enumerate(token_probs[case, node]):
                emitted = (*path, token)
                law[emitted] = law.get(emitted, 0.0) + chance[case] * prob
    return laws


def prefixes(vocab: int, length: int) -> list[Prefix]:
    """Returns every prefix of fewer tokens than `length`."""
    return [prefix for n in range(length) for prefix in itertools.product(range(vocab), repeat=n)]


def compose(laws: dict[Prefix, dict[Prefix, float]], vocab: int, length: int):
    """Returns the joint law of the first `length` tokens that steps emit, one after the other."""
    joint = np.zeros([vocab] * length)

    def go_on(prefix: Prefix, chance: float) -> None:
        if len(prefix) >= length:
            joint[prefix[:length]] += chance
            return
        for emitted, probability in laws[prefix].items():
            go_on(prefix + emitted, chance * probability)

    go_on((), 1.0)
    return joint


def total_variation(
    rule, shape: Shape, order, target: Law, drafter: Drafter, *, length: int = 3
) -> float:
    """Returns how far the joint law of `length` emitted tokens is from the target's."""
    vocab = len(target(()))
    laws = step_laws(rule, shape, order, target, drafter, prefixes(vocab, length))
    joint = compose(laws, vocab, length)
    assert abs(joint.sum() - 1) < LAW_TOLERANCE
    return float(np.abs(joint - joint_law(target, length)).sum() / 2)


def mean_accepted(laws: dict[Prefix, float]) -> float:
    """Returns the expected number of accepted draft tokens of one step's law."""
    return sum(chance * (len(emitted) - 1) for emitted, chance in laws.items())


def compiled(rule, **options):
    """Returns the rule compiled anew, with whatever has been patched by now.

    It is optimised even where tests are not: it runs some hundred times.

    Args:
      options: of the compiler.
    """
    options = {"xla_backend_optimization_level": 3} | options
    return jax.jit(lambda *arguments: rule(*arguments), compiler_options=options)


def compiled_quickly(rule):
    """Returns `compiled`, without optimisation: for rules that run a few times."""
    return compiled(rule, xla_backend_optimization_level=0)
