"""EngineConfig.kernels: which implementation runs an op."""

import dataclasses
import importlib
import inspect

import jax
import pytest
from helpers import tiny_llama

import specjax
from pallas_kernels import implementations
from pallas_kernels.implementations import by_name, call_best, named_for, trusted_for
from pallas_kernels.names import IMPLEMENTATIONS
from specjax.api import assemble
from specjax.config.engine import KERNELS, EngineConfig
from specjax.decode.background import wait_for_all
from specjax.decode.bucket import Bucket
from specjax.decode.config import DecoderConfig
from specjax.decode.decoder import Decoder
from specjax.decode.sizes import Sizes
from specjax.drafters.spec import NgramDrafter
from specjax.policy import cost_files
from specjax.types import DecoderParams

ENGINE = EngineConfig(page_size=8, max_rows=2, burst_steps=2, max_context=32)
PROMPTS = [[1, 2, 3, 1, 2], [5]]
SAMPLING = specjax.SamplingParams(max_tokens=8, temperature=0.7, seed=1, ignore_eos=True)


@pytest.fixture(scope="module")
def target():
    return tiny_llama(0)


def generate(target, engine):
    return specjax.generate(
        target,
        PROMPTS,
        drafter="ngram",
        speculative_config={"policy": "fixed", "num_speculative_tokens": 2},
        sampling=SAMPLING,
        engine=engine,
    )


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_names_are_those_of_the_op(op):
    """What the op calls by name is what `pallas_kernels.names` lists, in its order."""
    source = inspect.getsource(importlib.import_module(f"pallas_kernels.{op}.api"))
    listed = source.split("implementations = {")[1].split("}")[0]
    found = [line.strip().split('"')[1] for line in listed.splitlines() if ":" in line]
    assert tuple(found) == IMPLEMENTATIONS[op]


def test_a_name_holds_within_and_an_argument_wins():
    assert named_for("tree_attention", None) is None
    with by_name([("tree_attention", "xla")]):
        assert named_for("tree_attention", None) == "xla"
        assert named_for("tree_attention", "reference") == "reference"
        assert named_for("write_kv", None) is None
    assert named_for("tree_attention", None) is None
    # jit traces anew where names differ.
    traces = []
    run = jax.jit(lambda x: (traces.append(named_for("tree_attention", None)), x)[1])
    run(1.0)
    with by_name([("tree_attention", "xla")]):
        run(1.0)
        run(1.0)
    run(1.0)
    assert traces == [None, "xla"]


@pytest.mark.full
def test_a_named_implementation_runs(target, monkeypatch):
    """Every op that a step calls, and no other, is called by its name."""
    asked = set()

    def noted(op, implementations, name):
        asked.add((op, name))
        return call_best(op, implementations, name)

    for op in ("tree_attention", "write_kv", "ngram_match"):
        module = importlib.import_module(f"pallas_kernels.{op}.api")
        monkeypatch.setattr(module, "call_best", noted)
    config = DecoderConfig(
        target=target.config,
        drafter=NgramDrafter(1, 2),
        sizes=Sizes(rows=2, page_size=8, num_pages=8, pages_per_row=4, burst_steps=2),
        engine=dataclasses.replace(ENGINE, kernels={"tree_attention": "xla"}),
    )
    decoder = Decoder(config)
    params = DecoderParams(target.params)
    state, bucket = decoder.init(), Bucket(2, 2)
    decoder.prepare(params, state, bucket)
    wait_for_all()
    assert asked == {
        ("tree_attention", "xla"),
        ("write_kv", None),
        ("ngram_match", None),
    }


def decoder_config(target, **changes):
    return DecoderConfig(
        target=target.config,
        drafter=NgramDrafter(1, 2),
        sizes=Sizes(rows=2, page_size=8, num_pages=8, pages_per_row=4, burst_steps=2),
        engine=ENGINE,
        **changes,
    )


@pytest.mark.full
def test_kernels_trusted_by_a_setup_reach_the_ops_and_the_keys(target, monkeypatch):
    trusted = (("tree_attention", "mosaic_gpu"),)
    monkeypatch.setattr(assemble, "trusted_kernels", lambda engine, devices, dtype: trusted)
    setup = assemble.Setup.of(target, engine=ENGINE)
    decoder = setup.decoder(decoder_config(target).sizes, ())
    assert decoder.config.trusted_kernels == trusted
    assert setup._plan_request.decoder_config(1, 1).trusted_kernels == trusted
    seen = set()

    def noted(op, implementations, name):
        seen.add((op, name, trusted_for(op)))
        return call_best(op, implementations, name)

    monkeypatch.setattr("pallas_kernels.tree_attention.api.call_best", noted)
    decoder = Decoder(decoder_config(target, trusted_kernels=trusted))
    params, bucket = DecoderParams(target.params), Bucket(2, 2)
    state = decoder.init()
    decoder.prepare(params, state, bucket)
    wait_for_all()
    assert seen == {("tree_attention", None, "mosaic_gpu")}
    plain = Decoder(decoder_config(target))
    assert cost_files.key_of(decoder) != cost_files.key_of(plain)
    assert repr(decoder.config) != repr(plain.config)  # names executables on disk


@pytest.mark.full
def test_output_is_the_same_and_executables_are_not_shared(target):
    """On a CPU the best implementation is XLA's; named, it gives the same tokens."""
    named = dataclasses.replace(ENGINE, kernels={"tree_attention": "xla", "write_kv": "xla"})
    assert named != ENGINE
    ours, theirs = generate(target, ENGINE), generate(target, named)
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
    configs = [
        DecoderConfig(
            target=target.config,
            drafter=NgramDrafter(),
            sizes=Sizes(rows=2, page_size=8, num_pages=8, pages_per_row=4, burst_steps=2),
            engine=engine,
        )
        for engine in (ENGINE, named)
    ]
    assert repr(configs[0]) != repr(configs[1])
    keys = [cost_files.key_of(Decoder(config)) for config in configs]
    assert keys[0] != keys[1]


def test_another_platforms_kernel_is_refused(target):
    engine = dataclasses.replace(ENGINE, kernels={"tree_attention": "mosaic_gpu"})
    with pytest.raises(ValueError, match=r"'mosaic_gpu' runs on gpu, and this is cpu; leave it"):
        generate(target, engine)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("xla", "must be a mapping of an op to its implementation"),
        ({"attention": "xla"}, "has 'attention', which is no op; expected any of tree_attention"),
        ({"write_kv": "mosaic_gpu"}, "must be one of mosaic_tpu, xla"),
        ({"write_kv": "reference"}, "must be one of mosaic_tpu, xla"),
        ({"write_kv": None}, "None must be one of"),
        (3, "must be a mapping"),
    ],
    ids=str,
)
def test_names_that_are_none(given, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(kernels=given)


def test_a_config_with_kernels_is_a_value():
    one = EngineConfig(kernels={"write_kv": "xla", "move_kv": "xla"})
    other = EngineConfig(kernels=(("move_kv", "xla"), ("write_kv", "xla")))
    assert one == other
    assert hash(one) == hash(other)
    assert dataclasses.replace(one, max_rows=2).kernels == one.kernels
    assert set(KERNELS) == set(IMPLEMENTATIONS)
    assert all("reference" not in names for names in KERNELS.values())
    assert implementations.named_for("write_kv", None) is None
