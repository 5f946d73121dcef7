"""How many layers are compiled in place of all, where layers differ."""

import dataclasses

import pytest
from helpers import tiny_llama_config
from made_up_families import HERON, heron_config

from specjax.config.engine import EngineConfig
from specjax.drafters.spec import NoDrafter
from specjax.models import register
from specjax.planning import devices, plan_request, plans
from specjax.planning.compiled_memory import compile_bucket
from specjax.planning.layer_pattern import layers_to_compile

NARROW, WIDE, FIRST_WIDE = 16, 512, 4


def _init(key, config, dtype):
    """Weights of Heron whose MLPs are narrow in the first layers; no field of config says so."""

    of_size = lambda mlp: HERON.init(key, dataclasses.replace(config, intermediate_size=mlp), dtype)
    narrow, wide = of_size(NARROW), of_size(WIDE)
    return wide | {"layers": narrow["layers"][:FIRST_WIDE] + wide["layers"][FIRST_WIDE:]}


def dense_first_config(num_layers):
    register(DENSE_FIRST)
    return heron_config(
        architecture=DENSE_FIRST.name, num_layers=num_layers, layer_windows=(), layer_ropes=()
    )


DENSE_FIRST = dataclasses.replace(HERON, name="dense first", model_types={}, init=_init)


@pytest.mark.parametrize(
    "windows, counts",
    [
        ((None,) * 32, (2, 4)),
        ((None,) * 4, (4, 4)),
        ((9,), (1, 1)),
        ((9, None) * 16, (3, 5)),
        (((9,) * 5 + (None,)) * 5, (7, 13)),  # Gemma 3
        (((9,) * 5 + (None,)) * 4 + (9, 9), (7, 13)),
        ((None,) * 3 + (9,) * 29, (5, 7)),
        ((None,) * 3 + (9, 9, None) * 9, (6, 9)),
        ((None,) * 28 + (9,) * 4, (32, 32)),  # the pattern ends too late
        ((9,) * 31 + (None,), (32, 32)),
    ],
)
def test_a_pattern_of_windows(windows, counts):
    config = tiny_llama_config(num_layers=len(windows), layer_windows=windows)
    assert layers_to_compile(config) == counts


def test_weights_of_other_shapes_are_a_pattern():
    assert layers_to_compile(dense_first_config(32)) == (6, 8)
    assert layers_to_compile(dense_first_config(8)) == (8, 8)


def test_layers_whose_weights_are_not_found_are_all_compiled():
    def init(*arguments):
        weights = HERON.init(*arguments)
        layers = weights.pop("layers")
        return weights | {f"layer_{index}": layer for index, layer in enumerate(layers)}

    register(dataclasses.replace(HERON, name="no tuple", model_types={}, init=init))
    config = heron_config(architecture="no tuple", num_layers=16, layer_windows=(), layer_ropes=())
    assert layers_to_compile(config) == (16, 16)


@pytest.mark.slow
def test_later_layers_that_are_wider_are_planned_for():
    config = dense_first_config(10)
    request = plan_request.PlanRequest(
        target=config,
        target_name="dense first",
        drafter=NoDrafter(),
        drafter_name="none",
        device=devices.find_device("cpu"),
        dtype="float32",
        num_speculative_tokens=0,
        engine=EngineConfig(max_rows=4, row_buckets=(), max_context=128, max_prefill_tokens=64),
    )
    planned = plans.make_plan(request).compiled
    assert planned.compiled_layers == (6, 8)
    largest = max(planned.buckets, key=lambda memory: memory.temp_bytes)
    whole = compile_bucket(plans.decoder_of(request, config.num_layers, 4096), largest.bucket)
    assert largest.scratch_bytes == pytest.approx(whole.scratch_bytes, rel=0.02)
    assert largest.scratch_bytes > 4 * WIDE * largest.bucket.tokens
