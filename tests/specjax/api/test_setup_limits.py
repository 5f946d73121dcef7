"""What a setup makes of fewer pages, of several devices, and of a budget over shards."""

import dataclasses
import types

import jax
import numpy as np
import pytest
from helpers import ENGINE, tiny_llama
from jax.sharding import Mesh
from test_setup import memory_plan

from specjax.api.assemble import Setup
from specjax.config.engine import EngineConfig


def mesh_of(name):
    return Mesh(np.array(jax.devices()[:2]), (name,))


@pytest.mark.parametrize("num_pages", [100, 75, 50, 200])
def test_fewer_pages_than_planned_hold_fewer_tokens(monkeypatch, num_pages):
    setup = Setup.of(tiny_llama(0), engine=EngineConfig(memory_bytes=10**9)).for_run([])
    plan = memory_plan(100)
    monkeypatch.setattr(Setup, "memory", plan)
    sizes = dataclasses.replace(setup.standing_sizes(), num_pages=num_pages)
    most = setup._most_tokens(sizes)
    assert most == plan.most_tokens * min(num_pages, 100) // 100


def test_who_says_how_many_pages_has_the_last_word(monkeypatch):
    engine = EngineConfig(memory_bytes=10**9, num_pages=50)
    setup = Setup.of(tiny_llama(0), engine=engine).for_run([])
    monkeypatch.setattr(Setup, "memory", memory_plan(100))
    assert setup._most_tokens(setup.standing_sizes()) is None


def test_fewer_pages_are_as_many_on_every_shard():
    setup = Setup.of(tiny_llama(0), engine=ENGINE, mesh=mesh_of("data")).for_run([])
    sizes = dataclasses.replace(setup.standing_sizes(), num_pages=100, pages_per_row=4)
    with pytest.warns(UserWarning, match="100 pages do not fit .*with 74"):
        fewer = setup._fewer_pages(sizes)
    assert fewer is not None
    assert fewer.num_pages == 74


def test_the_device_with_least_memory_counts(monkeypatch):
    setup = Setup.of(tiny_llama(0), engine=ENGINE, mesh=mesh_of("tensor"))
    limits = [9216, 7040]
    devices = [
        types.SimpleNamespace(memory_stats=lambda limit=limit: {"bytes_limit": limit})
        for limit in limits
    ]
    monkeypatch.setattr(Setup, "_devices", devices)
    monkeypatch.setattr("specjax.api.assemble.bytes_on", lambda device, arrays: 0)
    assert setup.with_reported_memory().engine.memory_bytes == min(limits)
    # One that does not say leaves nothing known of all.
    devices[0].memory_stats = lambda: None
    assert setup.with_reported_memory().engine.memory_bytes is None


@pytest.mark.parametrize(
    ("most", "axis", "rows", "expected"),
    [
        (4, "data", 8, 2),
        (5, "data", 8, 2),
        (4, "tensor", 8, 4),
        (100, "data", 8, None),
        (24, "tensor", 8, None),
        (23, "tensor", 8, 23),
    ],
)
def test_each_shard_verifies_its_part_of_the_drafts(most, axis, rows, expected):
    model = tiny_llama(0)
    setup = Setup.of(
        model,
        drafter=model,
        num_speculative_tokens=3,
        speculative_config={"max_drafts_per_step": most},
        mesh=mesh_of(axis),
    )
    assert setup._max_drafts_per_shard(rows) == expected


def test_fewer_drafts_than_shards_are_refused():
    model = tiny_llama(0)
    setup = Setup.of(
        model,
        drafter=model,
        speculative_config={"max_drafts_per_step": 1},
        mesh=mesh_of("data"),
    )
    with pytest.raises(ValueError, match="below the mesh's 2 data shards"):
        setup._max_drafts_per_shard(8)
