"""Step costs on disk: whose they are, and what happens to files that are broken."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_llama
from jax.sharding import Mesh

from specjax.config.engine import EngineConfig
from specjax.decode.bucket import Bucket
from specjax.decode.config import DecoderConfig
from specjax.decode.decoder import Decoder
from specjax.decode.sizes import Sizes
from specjax.drafters.spec import ModelDrafter, NgramDrafter
from specjax.policy import cost_files
from specjax.policy.cost_files import Known
from specjax.policy.step_cost import MEMORY, StepCosts
from specjax.policy.survival import KEPT_TRIALS, Survival
from specjax.runtime import compilation_cache

SIZES = Sizes(rows=4, page_size=16, num_pages=16, pages_per_row=4, burst_steps=8)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE_DIR", str(tmp_path))
    return tmp_path


def decoder(drafter=None, sizes=SIZES, mesh=None, **engine):
    config = tiny_llama(0, vocab_size=61, num_layers=1).config
    engine = EngineConfig(**engine)
    return Decoder(
        DecoderConfig(
            target=config, drafter=drafter or NgramDrafter(), sizes=sizes, engine=engine, mesh=mesh
        )
    )


# Fields of Survival.to_record.
KEPT = ("stood", "expected", "asked", "proposed", "all")


def some_costs():
    costs = StepCosts()
    for _ in range(MEMORY):
        for bucket in (Bucket(4, 0), Bucket(4, 3), Bucket(4, 3, 4)):
            costs.observe(bucket, 100, 1e-3 * (1 + bucket.num_slots))
    return costs


def loaded(of):
    costs = StepCosts()
    return costs if cost_files.load(of, Known(costs)) else None


def test_what_was_kept_is_found_again():
    path = cost_files.save(decoder(), Known(some_costs()))
    assert path is not None
    found = loaded(decoder())
    assert found is not None
    expected = some_costs().seconds(Bucket(4, 3), 100)
    assert found.seconds(Bucket(4, 3), 100) == pytest.approx(expected, rel=0.02)
    assert found.count(Bucket(4, 3)) == MEMORY
    document = json.loads(path.read_text())
    assert {"key", "date", "steps"} <= set(document)


def test_acceptance_is_kept_by_kind_of_sampling():
    survival = Survival(3)
    stood = np.full((40, 2), 2)
    drafted = np.full((40, 2), 3)
    asked = np.full(2, 3)
    survival.observe(np.arange(2), stood + 1, stood, drafted, drafted, asked)
    records = {"greedy": survival.to_record()}
    cost_files.save(decoder(), Known(some_costs(), records))
    known = Known(StepCosts())
    assert cost_files.load(decoder(), known)
    assert list(known.acceptance) == ["greedy"]
    found = Survival.of_record(known.acceptance["greedy"], 3)
    assert found.num_trials == pytest.approx(KEPT_TRIALS)
    of_mean = lambda own: own.of_rates(own.rates(np.array([77])))[0]
    np.testing.assert_allclose(of_mean(found), of_mean(survival), atol=0.2)
    # Of a larger K too.
    assert Survival.of_record(known.acceptance["greedy"], 5).profile().shape == (5,)


def test_rooms_of_any_size_share_their_costs():
    cost_files.save(decoder(), Known(some_costs()))
    larger = dataclasses.replace(SIZES, rows=32, num_pages=999, pages_per_row=64)
    assert loaded(decoder(sizes=larger)) is not None


@pytest.mark.parametrize(
    "other",
    [
        lambda: decoder(NgramDrafter(max_match=9)),
        lambda: decoder(ModelDrafter(decoder().target)),
        lambda: decoder(sizes=dataclasses.replace(SIZES, page_size=32)),
        lambda: decoder(sizes=dataclasses.replace(SIZES, dtype=jnp.bfloat16)),
        lambda: decoder(numerics="invariant"),
        lambda: decoder(logit_bytes=5),
    ],
)
def test_others_find_nothing(other):
    cost_files.save(decoder(), Known(some_costs()))
    assert loaded(other()) is None


def test_another_version_finds_nothing(monkeypatch):
    cost_files.save(decoder(), Known(some_costs()))
    monkeypatch.setattr(cost_files, "__version__", "0.0.0")
    assert loaded(decoder()) is None


def test_meshes_of_one_size_are_told_apart():
    devices = np.array(jax.devices()[:2])
    keys = []
    for name in ("data", "tensor"):
        mesh = Mesh(devices, (name,))
        keys.append(cost_files.key_of(decoder(mesh=mesh)))
    assert cost_files.path_of(keys[0]) != cost_files.path_of(keys[1])
    assert {key["num_devices"] for key in keys} == {2}


def test_a_file_that_was_copied_from_another_counts_as_none():
    other = cost_files.save(decoder(logit_bytes=5), Known(some_costs()))
    own = cost_files.path_of(cost_files.key_of(decoder()))
    assert other is not None
    assert own is not None
    other.rename(own)
    assert loaded(decoder()) is None


def test_nothing_of_a_file_is_taken_that_breaks_off():
    path = cost_files.save(decoder(), Known(some_costs()))
    assert path is not None
    document = json.loads(path.read_text())
    document["steps"].append({"rows": 1})
    path.write_text(json.dumps(document))
    costs = StepCosts()
    with pytest.warns(UserWarning, match="cannot be read"):
        assert not cost_files.load(decoder(), Known(costs))
    assert costs.measured == []


@pytest.mark.parametrize(
    "change",
    [
        lambda document: "{",
        lambda document: json.dumps(document | {"steps": [{"rows": 1}]}),
        lambda document: json.dumps(document | {"steps": 3}),
        lambda document: json.dumps(document | {"steps": document["steps"] * 999}),
        lambda document: json.dumps(
            document | {"steps": [step | {"num_behind": 10**400} for step in document["steps"]]}
        ),
        lambda document: json.dumps(
            document | {"steps": [step | {"step_s": 1e-300} for step in document["steps"]]}
        ),
        lambda document: json.dumps(
            document | {"acceptance": {"greedy": {name: [10**400] for name in KEPT}}}
        ),
        lambda document: "[[",
        lambda document: json.dumps(document).replace('"rows": 4', '"rows": 1e999', 1),
        lambda document: json.dumps({k: document[k] for k in ("format", "key")}),
        lambda document: json.dumps(document | {"acceptance": {"greedy": {}}}),
        lambda document: json.dumps(
            document | {"acceptance": {"greedy": {name: [-1.0] for name in KEPT}}}
        ),
    ],
)
def test_a_broken_file_is_named_and_counts_as_none(change):
    path = cost_files.save(decoder(), Known(some_costs()))
    path.write_text(change(json.loads(path.read_text())))
    with pytest.warns(UserWarning, match="cannot be read .*calibrate"):
        assert loaded(decoder()) is None


def test_nothing_is_kept_where_nothing_may_be(monkeypatch):
    assert cost_files.save(decoder(), Known(StepCosts())) is None
    monkeypatch.setenv("SPECJAX_CACHE_DIR", "off")
    assert cost_files.save(decoder(), Known(some_costs())) is None
    assert loaded(decoder()) is None


def test_another_jax_finds_nothing(monkeypatch):
    cost_files.save(decoder(), Known(some_costs()))
    monkeypatch.setattr(jax, "__version__", "0.0.0")
    assert loaded(decoder()) is None


def test_another_processor_finds_nothing(monkeypatch):
    cost_files.save(decoder(), Known(some_costs()))
    monkeypatch.setattr(compilation_cache, "processor", lambda: "another")
    assert loaded(decoder()) is None


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX")
def test_only_the_owner_may_write():
    before = os.umask(0)
    try:
        path = cost_files.save(decoder(), Known(some_costs()))
    finally:
        os.umask(before)
    assert path is not None
    assert path.parent.stat().st_mode & 0o077 == 0
