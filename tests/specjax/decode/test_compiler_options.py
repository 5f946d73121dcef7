"""Which options bursts are compiled with, and what becomes of options that XLA does not know."""

import types

import jax
import jax.numpy as jnp
import pytest
from helpers import tiny_llama

import specjax
from specjax.decode import executable_store, steps
from specjax.decode.compiler_options import burst_options, compile_with

GRAPHS = "xla_gpu_enable_command_buffer"


def device(platform, version):
    return types.SimpleNamespace(
        platform=platform, client=types.SimpleNamespace(platform_version=version)
    )


CUDA = device("gpu", "PJRT C API\ncuda 13000")


@pytest.fixture
def no_flags(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)


@pytest.mark.usefixtures("no_flags")
def test_a_burst_is_one_graph_on_a_cuda_gpu():
    commands = burst_options(CUDA, mesh=None)[GRAPHS].split(",")
    assert {"WHILE", "CONDITIONAL", "FUSION", "CUSTOM_CALL"} <= set(commands)


@pytest.mark.parametrize(
    "other", [device("gpu", "rocm 6"), device("tpu", "libtpu"), device("cpu", "cpu")]
)
def test_other_devices_keep_the_options_of_xla(other):
    assert burst_options(other, mesh=None) is None


def test_so_do_meshes_and_whoever_chooses_the_commands(no_flags, monkeypatch):
    of_devices = lambda count: types.SimpleNamespace(size=count)
    assert burst_options(CUDA, mesh=of_devices(2)) is None
    assert burst_options(CUDA, mesh=of_devices(1)) == burst_options(CUDA, mesh=None)
    monkeypatch.setenv("XLA_FLAGS", f"--xla_other=1 --{GRAPHS}=")
    assert burst_options(CUDA, mesh=None) is None


def test_options_are_given_to_the_compiler():
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(2))
    given = {}
    compiler = types.SimpleNamespace(compile=lambda **options: given.update(options))
    compile_with(compiler, {GRAPHS: "WHILE"})
    assert given == {"compiler_options": {GRAPHS: "WHILE"}}
    # What is wrong is not one of our options: the error is the caller's.
    fault = lambda **_: lowered.compile(compiler_options={"xla_embed_ir_in_executable": "x"})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_embed_ir_in_executable"):
        compile_with(types.SimpleNamespace(compile=fault), {GRAPHS: "WHILE"})


def test_options_that_are_unknown_are_left_out():
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(2))
    run = compile_with(lowered, {"xla_no_such_option": "1"})
    assert run(jnp.ones(2)).tolist() == [2, 2]


@pytest.mark.full
def test_bursts_get_them_and_other_steps_do_not(monkeypatch):
    """A decoder of its own, so that its steps are compiled here."""
    given = {}

    def compile_new(name, lowered, options=None):
        given.setdefault(lowered.as_text()[:200], []).append(options)
        return lowered.compile(), False

    monkeypatch.setattr(steps, "burst_options", lambda device, mesh: {GRAPHS: "WHILE"})
    monkeypatch.setattr(executable_store, "compile_new", compile_new)
    monkeypatch.setattr(executable_store, "load", lambda name, inputs: None)
    target = tiny_llama(0, vocab_size=53)
    specjax.generate(target, [[1, 2, 3]], sampling=specjax.SamplingParams(max_tokens=3))
    bursts = [options for text, options in given.items() if "jit_burst" in text]
    others = [options for text, options in given.items() if "jit_burst" not in text]
    assert bursts
    assert others
    assert all(each == [{GRAPHS: "WHILE"}] for each in bursts)
    assert all(set(map(str, each)) == {"None"} for each in others)
