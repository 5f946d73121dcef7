"""The page pool against a model in plain Python, and its edges one by one."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import layout
from specjax.cache import paged
from specjax.cache.paged import NO_PAGE, PagedKVCache
from specjax.models.base import ModelConfig

CONFIG = ModelConfig(
    architecture="llama",
    family="llama",
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_layers=2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=64,
)
ROWS, NUM_PAGES, PAGE_SIZE, PAGES_PER_ROW = 4, 9, 4, 4
MAX_WRITTEN = 6  # tokens per row and write

allocate = jax.jit(paged.allocate)
share = jax.jit(paged.share)
make_writable = jax.jit(paged.make_writable)
commit = jax.jit(paged.commit)
release = jax.jit(paged.release)
slots = jax.jit(paged.slots, static_argnames=("page_size", "num_slots"))


def new_cache(**sizes) -> PagedKVCache:
    defaults = {
        "rows": ROWS,
        "num_pages": NUM_PAGES,
        "page_size": PAGE_SIZE,
        "pages_per_row": PAGES_PER_ROW,
    }
    return paged.init(CONFIG, dtype=jnp.float32, **(defaults | sizes))


def i32(*values) -> jax.Array:
    return jnp.array(values, jnp.int32)


def masked(*rows: int) -> jax.Array:
    return jnp.isin(jnp.arange(ROWS), jnp.array(rows))


def held_pages(cache: PagedKVCache, row: int) -> list[int]:
    return [page for page in cache.block_table[row].tolist() if page != NO_PAGE]


def free_pages(cache: PagedKVCache) -> list[int]:
    return cache.free_pages[: cache.num_free[0]].tolist()


def check_invariants(cache: PagedKVCache) -> None:
    """No page lost, none held that is free, none counted wrongly."""
    holders = collections.Counter()
    for table_row in np.asarray(cache.block_table).tolist():
        pages = table_row[: sum(page != NO_PAGE for page in table_row)]
        assert NO_PAGE not in pages, "a gap in a row's table"
        assert len(set(pages)) == len(pages), "a row holds a page twice"
        holders.update(pages)
    assert cache.ref_counts.tolist() == [holders[p] for p in range(cache.num_pages)]
    free = free_pages(cache)
    assert sorted([*free, *holders]) == list(range(cache.num_pages))


def assert_unchanged(before, after) -> None:
    for left, right in zip(jax.tree.leaves(before), jax.tree.leaves(after)):
        np.testing.assert_array_equal(left, right)


@functools.partial(jax.jit, static_argnames="width")
def row_slots(cache, starts, width: int):
    """Returns each row's slots from starts on, i32[rows, width]."""
    row_ids, ahead = jnp.divmod(jnp.arange(ROWS * width), width)
    return paged.slots(
        cache.block_table,
        row_ids,
        starts[row_ids] + ahead,
        page_size=cache.page_size,
        num_slots=cache.num_slots,
    ).reshape(ROWS, width)


@jax.jit
def write_values(cache, drafter_pages, starts, values, counts):
    """Writes values f32[rows, n] as keys, negated as values; 100 more a layer."""
    width = values.shape[1]
    is_written = jnp.arange(width)[None, :] < counts[:, None]
    targets = row_slots(cache, starts, width)
    targets = jnp.where(is_written, targets, cache.num_slots).reshape(-1)
    k = jnp.broadcast_to(values.reshape(-1, 1, 1), (values.size, 1, CONFIG.head_dim))
    layers = [*cache.pages, *drafter_pages]
    layers = tuple(
        paged.write(pages, k + 100 * layer, -k - 100 * layer, targets)
        for layer, pages in enumerate(layers)
    )
    num_layers = len(cache.pages)
    cache = dataclasses.replace(cache, pages=layers[:num_layers])
    return cache, layers[num_layers:]


@jax.jit
def read_values(cache, drafter_pages):
    """Returns f32[rows, max_length, layers, 2] as written: everything a row can read."""
    places = row_slots(cache, jnp.zeros(ROWS, jnp.int32), PAGES_PER_ROW * PAGE_SIZE)
    read = [
        layout.read_slots(side, places)[..., 0, 0] * sign - 100 * layer
        for layer, pages in enumerate([*cache.pages, *drafter_pages])
        for side, sign in zip(pages, (1, -1), strict=True)
    ]
    return jnp.stack(read, axis=-1)


class Script:
    """A cache beside what it should hold: each row's values by position."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.cache = new_cache()
        self.drafter_pages = paged.init_pages(
            dataclasses.replace(CONFIG, num_layers=1), NUM_PAGES, PAGE_SIZE, jnp.float32
        )
        self.values = {row: [] for row in range(ROWS)}
        self.room = dict.fromkeys(range(ROWS), 0)  # pages
        self.counter = 0
        self.seen = collections.Counter()

    def run(self, num_operations: int) -> None:
        for _ in range(num_operations):
            names = ("allocate", "share", "write", "write", "release")
            getattr(self, self.rng.choice(names))()
            self.check()

    def check(self) -> None:
        check_invariants(self.cache)
        assert self.cache.lengths.tolist() == [len(v) for v in self.values.values()]
        held = paged.num_held(self.cache).tolist()
        assert held == list(self.room.values())
        read = np.asarray(read_values(self.cache, self.drafter_pages))
        for row, expected in self.values.items():
            found = read[row, : len(expected)]
            assert (found == np.array(expected).reshape(-1, 1)).all(), row

    def allocate(self) -> None:
        most = PAGES_PER_ROW * PAGE_SIZE + 1  # one too many
        wanted = self.rng.integers(0, most + 1, ROWS) * self.rng.integers(0, 2, ROWS)
        pages = -(-wanted // PAGE_SIZE)
        missing = {r: max(int(pages[r]) - self.room[r], 0) for r in range(ROWS)}
        lacks = sum(missing.values()) > len(free_pages(self.cache))
        overflows = max(pages) > PAGES_PER_ROW
        before = self.cache
        self.cache, is_out = allocate(before, jnp.asarray(wanted, jnp.int32))
        assert bool(is_out) == (lacks or overflows)
        self.seen["out", lacks, overflows] += 1
        if is_out:
            assert_unchanged(before, self.cache)
            return
        for row in range(ROWS):
            self.room[row] += missing[row]

    def share(self) -> None:
        empty = [row for row in range(ROWS) if not self.room[row]]
        full = [row for row in range(ROWS) if self.values[row]]
        if not empty or not full:
            return
        source, target = self.rng.choice(full), self.rng.choice(empty)
        count = int(self.rng.integers(1, len(self.values[source]) + 1))
        if self.rng.integers(2):
            count = len(self.values[source])
        self.cache = share(self.cache, i32(source)[0], i32(target)[0], i32(count)[0])
        self.values[target] = self.values[source][:count]
        self.room[target] = -(-count // PAGE_SIZE)

    def write(self) -> None:
        """Makes rows writable, writes as drafting does, commits part of it."""
        table = np.asarray(self.cache.block_table)
        lengths = [len(self.values[row]) for row in range(ROWS)]
        page_of = {
            row: table[row, length // PAGE_SIZE]
            for row, length in enumerate(lengths)
            if length < PAGES_PER_ROW * PAGE_SIZE
        }
        counts = np.asarray(self.cache.ref_counts)
        writers = collections.Counter(p for p in page_of.values() if p != NO_PAGE)
        # All but one writer copy; all copy when somebody else holds the page too.
        num_copies = sum(n - (counts[p] == n) for p, n in writers.items())
        before, drafter_before = self.cache, self.drafter_pages
        lacks = num_copies > len(free_pages(before))
        self.cache, self.drafter_pages, is_out = make_writable(before, drafter_before)
        assert bool(is_out) == lacks
        self.seen["copies", int(num_copies), lacks] += 1
        if lacks:
            assert_unchanged((before, drafter_before), (self.cache, self.drafter_pages))
            return
        assert len(free_pages(before)) - len(free_pages(self.cache)) == num_copies
        self.check()
        left = [self.room[row] * PAGE_SIZE - lengths[row] for row in range(ROWS)]
        written = [
            int(self.rng.integers(0, min(MAX_WRITTEN, room) + 1)) for room in left
        ]
        committed = [int(self.rng.integers(0, count + 1)) for count in written]
        values = self.counter + np.arange(ROWS * MAX_WRITTEN).reshape(ROWS, MAX_WRITTEN)
        self.counter = int(values[-1, -1] + 1) % 90
        self.cache, self.drafter_pages = write_values(
            self.cache,
            self.drafter_pages,
            self.cache.lengths,
            jnp.asarray(values, jnp.float32),
            jnp.asarray(written, jnp.int32),
        )
        self.cache = commit(self.cache, jnp.asarray(committed, jnp.int32))
        for row in range(ROWS):
            self.values[row] = self.values[row] + values[row, : committed[row]].tolist()

    def release(self) -> None:
        mask = self.rng.integers(0, 3, ROWS) == 0
        self.cache = release(self.cache, jnp.asarray(mask))
        for row in np.flatnonzero(mask):
            self.values[int(row)], self.room[int(row)] = [], 0


def test_random_scripts_agree_with_a_dict():
    seen = collections.Counter()
    for seed in range(4):
        script = Script(seed)
        script.run(100)
        seen.update(script.seen)
    # The scripts met what they are for: pages or table too small, copies of one
    # page by several rows, copies that lack pages.
    for outcome in ((False, False), (True, False), (False, True)):
        assert seen["out", *outcome], seen
    assert seen["copies", 1, False], seen
    assert seen["copies", 2, False], seen
    assert any(what == "copies" and lacks for what, _, lacks in seen), seen


def test_init_has_every_page_free_and_page_0_first():
    cache = new_cache()
    check_invariants(cache)
    assert (cache.page_size, cache.num_pages, cache.num_slots) == (4, 9, 36)
    cache, is_out = allocate(cache, i32(5, 0, 1, 0))
    assert not is_out
    assert cache.block_table[:, :3].tolist() == [
        [0, 1, NO_PAGE],
        [NO_PAGE] * 3,
        [2, NO_PAGE, NO_PAGE],
        [NO_PAGE] * 3,
    ]


def test_init_lays_the_pools_of_shards_end_to_end():
    whole = new_cache(num_pages=8, num_shards=2)
    assert whole.num_free.tolist() == [4, 4]
    for shard in range(2):
        part = lambda leaf: jnp.split(leaf, 2)[shard]  # noqa: B023
        cache = jax.tree.map(part, whole)
        check_invariants(cache)
        cache, is_out = allocate(cache, i32(16, 0))
        assert not is_out
        assert held_pages(cache, 0) == [0, 1, 2, 3]
        cache, is_out = allocate(cache, i32(16, 1))
        assert is_out


def test_allocate_counts_what_a_row_already_holds():
    cache, _ = allocate(new_cache(), i32(5, 4, 0, 0))
    again, is_out = allocate(cache, i32(8, 3, 0, 0))
    assert not is_out
    assert_unchanged(cache, again)
    more, _ = allocate(cache, i32(9, 5, 0, 0))
    assert held_pages(more, 0) == [0, 1, 3]
    assert held_pages(more, 1) == [2, 4]
    check_invariants(more)


def test_allocate_takes_the_last_page_and_then_none():
    cache, is_out = allocate(new_cache(), i32(16, 16, 4, 0))
    assert not is_out
    assert cache.num_free.tolist() == [0]
    after, is_out = allocate(cache, i32(0, 0, 0, 1))
    assert is_out
    assert_unchanged(cache, after)


def test_a_full_table_is_flagged_although_pages_are_free():
    cache = new_cache()
    after, is_out = allocate(cache, i32(17, 1, 0, 0))
    assert is_out
    assert_unchanged(cache, after)
    assert not allocate(cache, i32(16, 1, 0, 0))[1]


def test_released_pages_stay_until_their_last_holder_goes():
    cache, _ = allocate(new_cache(), i32(8, 0, 0, 0))
    cache = commit(cache, i32(8, 0, 0, 0))
    cache = share(cache, i32(0)[0], i32(1)[0], i32(8)[0])
    cache = share(cache, i32(1)[0], i32(2)[0], i32(3)[0])
    assert cache.ref_counts[:2].tolist() == [3, 2]
    cache = release(cache, masked(0))
    assert cache.ref_counts[:2].tolist() == [2, 1]
    assert not {0, 1} & set(free_pages(cache))
    cache = release(cache, masked(1))
    assert free_pages(cache)[-1] == 1
    assert 0 not in free_pages(cache)
    cache = release(cache, masked(2))
    check_invariants(cache)
    assert cache.num_free.tolist() == [NUM_PAGES]


def test_a_page_of_several_rows_released_at_once_is_freed_once():
    cache, _ = allocate(new_cache(), i32(3, 0, 0, 0))
    cache = commit(cache, i32(3, 0, 0, 0))
    for target in (1, 2):
        cache = share(cache, i32(0)[0], i32(target)[0], i32(3)[0])
    cache = release(cache, masked(0, 1, 2, 3))
    check_invariants(cache)
    assert cache.num_free.tolist() == [NUM_PAGES]
    assert cache.lengths.tolist() == [0] * ROWS


def shared_by_three(length: int) -> Script:
    """Rows 0, 1 and 2 hold the same `length` tokens."""
    script = Script(0)
    script.cache, _ = allocate(script.cache, i32(length, 0, 0, 0))
    values = jnp.tile(jnp.arange(MAX_WRITTEN, dtype=jnp.float32) + 1, (ROWS, 1))
    script.cache, script.drafter_pages = write_values(
        script.cache,
        script.drafter_pages,
        script.cache.lengths,
        values,
        i32(length, 0, 0, 0),
    )
    script.cache = commit(script.cache, i32(length, 0, 0, 0))
    for target in (1, 2):
        script.cache = share(script.cache, i32(0)[0], i32(target)[0], i32(length)[0])
    for row in range(3):
        script.values[row] = (np.arange(length) + 1.0).tolist()
        script.room[row] = -(-length // PAGE_SIZE)
    script.check()
    return script


def test_several_sharers_of_a_partly_filled_page_copy_it_at_once():
    script = shared_by_three(6)
    cache, drafter_pages, is_out = make_writable(script.cache, script.drafter_pages)
    assert not is_out
    last = [held_pages(cache, row)[1] for row in range(3)]
    assert len(set(last)) == 3
    assert last[2] == 1, "the last sharer keeps the page"
    assert [held_pages(cache, row)[0] for row in range(3)] == [0, 0, 0]
    assert cache.ref_counts[0] == 3
    script.cache, script.drafter_pages = cache, drafter_pages
    script.check()
    again, _, _ = make_writable(cache, drafter_pages)
    assert_unchanged(cache, again)


def test_a_shared_page_that_is_full_is_never_copied():
    for has_next_page in (False, True):
        script = shared_by_three(4)
        if has_next_page:
            script.cache, _ = allocate(script.cache, i32(8, 8, 0, 0))
        after, _, is_out = make_writable(script.cache, script.drafter_pages)
        assert not is_out
        assert_unchanged(script.cache, after)


def test_a_row_without_room_for_another_token_copies_nothing():
    cache = new_cache(num_pages=4)
    cache, _ = allocate(cache, i32(16, 0, 0, 0))
    cache = commit(cache, i32(16, 0, 0, 0))
    cache = share(cache, i32(0)[0], i32(1)[0], i32(16)[0])
    after, _, is_out = make_writable(cache)
    assert not is_out
    assert_unchanged(cache, after)


def test_copies_that_lack_pages_change_nothing():
    script = shared_by_three(6)
    full, is_out = allocate(script.cache, i32(0, 0, 0, 16))
    assert not is_out
    # Nine pages, two shared and four of row 3: take two more, and one is left
    # for two copies.
    full, _ = allocate(full, i32(12, 12, 0, 0))
    assert full.num_free.tolist() == [1]
    after, drafter_after, is_out = make_writable(full, script.drafter_pages)
    assert is_out
    assert_unchanged((full, script.drafter_pages), (after, drafter_after))


def test_slots_at_every_edge():
    table = jnp.array([[3, 0, NO_PAGE], [NO_PAGE] * 3, [2, 4, 1]], jnp.int32)
    none = 20  # five pages of four
    cases = {
        (0, 0): 12,
        (0, 3): 15,
        (0, 4): 0,
        (0, 7): 3,
        (0, 8): none,  # a page it lacks
        (0, -1): none,
        (0, -5): none,
        (1, 0): none,  # an empty row
        (2, 11): 7,
        (2, 12): none,  # past the table
        (2, 2**30): none,
        (3, 0): none,  # padding: no such row
        (-1, 0): none,
    }
    row_ids, positions = map(lambda ids: i32(*ids), zip(*cases, strict=True))
    found = slots(table, row_ids, positions, page_size=4, num_slots=none)
    assert found.tolist() == list(cases.values())


@pytest.mark.parametrize("page_size", [1, 8])
def test_slots_are_pages_in_order(page_size):
    table = jnp.array([[2, 0, 1]], jnp.int32)
    positions = jnp.arange(3 * page_size)
    found = slots(
        table,
        jnp.zeros_like(positions),
        positions,
        page_size=page_size,
        num_slots=3 * page_size,
    )
    within = np.arange(page_size)
    expected = np.concatenate([page * page_size + within for page in (2, 0, 1)])
    assert found.tolist() == expected.tolist()
