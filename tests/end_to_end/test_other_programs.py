"""Inside other programs: whatever they set in jax, where they call, what they do to weights."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest
from helpers import ENGINE, tiny_llama_config

import specjax
from specjax import SamplingParams
from specjax.decode.config import DecoderConfig
from specjax.decode.sizes import Sizes
from specjax.drafters.spec import HistoryDrafter, ModelDrafter, NgramDrafter, NoDrafter
from specjax.engine.faults import LostWeights
from specjax.planning.abstract_decoder import AbstractDecoder

pytestmark = pytest.mark.full

PROGRAM = pathlib.Path(__file__).with_name("other_program.py")

# Settings of jax, by what its environment calls them without the JAX_.
STOPPING = {
    "DEBUG_NANS": "1",
    "DEBUG_INFS": "1",
    "TRANSFER_GUARD": "disallow",
    "NUMPY_DTYPE_PROMOTION": "strict",
    "NUMPY_RANK_PROMOTION": "raise",
    "EXPLICIT_X64_DTYPES": "error",
    "DEBUG_KEY_REUSE": "1",
}
OTHERS = [
    {"ENABLE_X64": "1"},
    {"DISABLE_JIT": "1"},
    *({name: value} for name, value in STOPPING.items()),
    {"TRANSFER_GUARD": "log"},
    {"TRANSFER_GUARD": "disallow_explicit"},
    {"ENABLE_CHECKS": "1"},
    {"CHECK_TRACER_LEAKS": "1"},
    {"DEFAULT_DTYPE_BITS": "32"},
    {"DEFAULT_DTYPE_BITS": "64"},
    {"DEFAULT_MATMUL_PRECISION": "highest"},
    {"DEFAULT_MATMUL_PRECISION": "bfloat16"},
    {"DEFAULT_PRNG_IMPL": "rbg"},
    {"ENABLE_CUSTOM_PRNG": "1"},
    {"LEGACY_PRNG_KEY": "error"},
    {"THREEFRY_PARTITIONABLE": "0"},
    {"SOFTMAX_CUSTOM_JVP": "0"},
    {"CPU_ENABLE_ASYNC_DISPATCH": "0"},
    {"ENABLE_COMPILATION_CACHE": "0"},
]


def name_of(settings):
    return "+".join(f"{name}={value}" for name, value in settings.items())


def answers(folder, settings, *arguments):
    """Returns what the other program prints in a process of its own.

    Args:
      folder: of compiled steps: those of one process serve the next, as it asks for the same.
    """
    ours = {
        "SPECJAX_CACHE_DIR": "off",
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    theirs = {f"JAX_{name}": value for name, value in settings.items()}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        env=os.environ | ours | theirs,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """That of this run's own compiled steps, which may be kept between runs."""
    return jax.config.jax_compilation_cache_dir or tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def usual(folder):
    """What the program prints where nothing is set."""
    said = answers(folder, {})
    assert not any(isinstance(answer, str) for answer in said.values()), said
    return said


@pytest.mark.parametrize(
    "settings",
    [{"ENABLE_X64": "1", **STOPPING}, {"ENABLE_X64": "1", "DISABLE_JIT": "1"}],
    ids=["stopping", "not compiled"],
)
def test_tokens_are_the_same_whatever_a_program_sets(folder, usual, settings):
    assert answers(folder, settings) == usual


@pytest.mark.slow
@pytest.mark.parametrize("settings", OTHERS, ids=name_of)
def test_tokens_are_the_same_under_each_setting(folder, usual, settings):
    assert answers(folder, settings, "--score") == usual


DRAFTERS = [
    NoDrafter(),
    ModelDrafter(tiny_llama_config(num_layers=1)),
    NgramDrafter(),
    HistoryDrafter(4096),
]


def lowered_burst(drafter):
    """Returns the text of a step, and the shapes and dtypes of its state."""
    sizes = Sizes(rows=2, page_size=8, num_pages=8, pages_per_row=4, burst_steps=4)
    decoder = AbstractDecoder(
        DecoderConfig(target=tiny_llama_config(), drafter=drafter, sizes=sizes, engine=ENGINE)
    )
    state = decoder.abstract_state
    lowered = decoder.lower_burst(min(drafter.num_nodes(2) - 1, 2))
    return lowered.as_text(), jax.tree.leaves(state)


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda spec: type(spec).__name__)
def test_steps_are_traced_alike_whatever_a_program_sets(drafter):
    usual = lowered_burst(drafter)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        assert lowered_burst(drafter) == usual


# Inside a transformation


def jitted(call):
    jax.jit(lambda x: (call(), x)[1])(1.0)


def differentiated(call):
    jax.grad(lambda x: (call(), x)[1])(1.0)


def mapped(call):
    jax.vmap(lambda x: (call(), x)[1])(jnp.ones(2))


def scanned(call):
    jax.lax.scan(lambda carry, x: (call(), (carry, x))[1], 0, jnp.ones(2))


TRANSFORMATIONS = [jitted, differentiated, mapped, scanned]


@pytest.fixture(scope="module")
def decoder(target):
    return specjax.build_decoder(target, engine=ENGINE)


@pytest.mark.parametrize("transformed", TRANSFORMATIONS)
def test_a_call_inside_a_transformation_says_so(target, decoder, transformed):
    batch = specjax.Texts(*(jnp.ones((1, 2), jnp.int32) for _ in range(4)))
    calls = {
        "generate": lambda: specjax.generate(target, [[1]], engine=ENGINE),
        "stream": lambda: specjax.stream(target, [[1]], engine=ENGINE),
        "Engine": lambda: specjax.Engine(target, engine=ENGINE),
        "rollout": lambda: specjax.rollout(decoder, target.params, [[1]]),
        "score": lambda: specjax.score(decoder, target.params, batch),
        "build_decoder": lambda: specjax.build_decoder(target),
        "load_model": lambda: specjax.load_model("demo"),
    }
    for name, call in calls.items():
        message = rf"specjax\.{name} was called inside a jax transformation.*call it out"
        with pytest.raises(RuntimeError, match=message):
            transformed(call)


# Weights that are deleted, as a program does that donates them


def copied(model):
    """Returns a model of arrays that nobody else has."""
    return dataclasses.replace(model, params=jax.tree.map(jnp.copy, model.params))


def delete(params):
    jax.tree.map(lambda leaf: leaf.delete(), params)


def advance(engine, told):
    for chunk in engine.step(max_burst_steps=2):
        token_ids, reasons = told.setdefault(chunk.prompt_index, ([], []))
        token_ids += chunk.token_ids
        reasons += filter(None, [chunk.finish_reason])


# One K, for few steps to compile; the same in all tests, which share them.
ARGUMENTS = {
    "num_speculative_tokens": 2,
    "engine": ENGINE,
    "speculative_config": {"policy": "fixed"},
}


def served(target, draft, lose, **sampling):
    """Returns tokens and reasons of requests of which one begins before `lose()`."""
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=12, **sampling)
    told = {}
    with specjax.Engine(target, drafter=draft, **ARGUMENTS) as engine:
        engine.add([1, 2, 3], params)
        for _ in range(3):
            advance(engine, told)
        assert 0 < len(told[0][0]) < 12
        lose()
        with pytest.raises(RuntimeError, match="a step of specjax"):
            jitted(engine.step)  # which changes nothing
        engine.add([4, 5], params)
        while engine.has_work:
            advance(engine, told)
        engine.add([7, 8], params)
        while engine.has_work:
            advance(engine, told)
    return told


@pytest.fixture(scope="module")
def undisturbed(target, draft):
    told = served(target, draft, lambda: None)
    assert [reasons for _, reasons in told.values()] == [["length"]] * 3
    return told


def test_a_drafter_whose_weights_are_deleted_is_turned_off(target, draft, undisturbed):
    own = copied(draft)
    with pytest.warns(UserWarning, match=r"turned off.*embed_tokens.*were deleted") as w:
        told = served(target, own, lambda: delete(own.params))
    assert len(w) == 1
    assert told == undisturbed


def test_deleted_draft_weights_are_nothing_to_requests_without_drafts(target, draft, undisturbed):
    own = copied(draft)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        told = served(target, own, lambda: delete(own.params), speculate=False)
    assert told == undisturbed


def test_a_drafter_whose_weights_were_deleted_before_is_turned_off(target, draft, undisturbed):
    own = copied(draft)
    delete(own.params)
    with pytest.warns(UserWarning, match="turned off.*were deleted"):
        assert served(target, own, lambda: None) == undisturbed


def test_deleted_weights_of_the_target_are_named(target, draft):
    own = copied(target)
    sampling = SamplingParams(max_tokens=12, temperature=0)
    with specjax.Engine(own, drafter=draft, **ARGUMENTS) as engine:
        engine.add([1, 2, 3], sampling)
        engine.step(max_burst_steps=2)
        delete(own.params)
        with pytest.raises(LostWeights, match=r"target's weights \['embed_tokens'\]"):
            engine.step(max_burst_steps=2)
        (chunk,) = engine.step()
        assert chunk.finish_reason == "error"
        assert "were deleted" in str(chunk.error)
        assert not engine.has_work
    for mesh in (None, jax.make_mesh((2,), ("tensor",))):
        with pytest.raises(LostWeights, match="keep the arrays while requests run"):
            specjax.generate(own, [[1, 2]], sampling=sampling, mesh=mesh, **ARGUMENTS)


@pytest.mark.slow
def test_deleted_draft_weights_are_seen_before_a_mesh_takes_them(target, draft):
    mesh = jax.make_mesh((2,), ("tensor",))
    own = copied(draft)
    delete(own.params)
    sampling = SamplingParams(max_tokens=4, temperature=0)
    arguments = {"sampling": sampling, "mesh": mesh, **ARGUMENTS}
    with pytest.warns(UserWarning, match="turned off.*were deleted"):
        specjax.generate(target, [[1, 2]], drafter=own, **arguments)
