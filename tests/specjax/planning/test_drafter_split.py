"""Over how many devices a drafter is split: chosen by time, or as asked for where possible."""

import dataclasses
import re

import pytest
from helpers import tiny_llama_config
from tap_keeper import TapKeeper

from specjax.configs.devices import DEVICES
from specjax.drafters.base import DrafterSpec
from specjax.drafters.spec import HybridDrafter, ModelDrafter, NgramDrafter, NoDrafter
from specjax.paged.work import model_work
from specjax.planning import drafter_split
from specjax.planning.devices import Device
from specjax.planning.drafter_split import draft_token_s, possible_shards, split_drafter
from specjax.planning.named_models import find_config
from specjax.planning.plan_request import PlanRequest, with_split_drafter
from specjax.planning.roofline import choose_num_speculative_tokens, roofline_step_s

V5E = DEVICES["v5e"].per_device()
TARGET = find_config("llama-3.1-8b")
ONE_B = ModelDrafter(find_config("llama-3.2-1b"))
EIGHT_HEADS = ModelDrafter(tiny_llama_config(num_heads=8, num_kv_heads=8, intermediate_size=128))
TWO_KV_HEADS = ModelDrafter(tiny_llama_config(num_heads=8, num_kv_heads=2, intermediate_size=128))


def seconds_of(target, rows=32, context=2048):
    return lambda spec: draft_token_s(spec, target, "bfloat16", V5E, rows=rows, context=context)


def test_a_large_drafter_is_split_and_a_very_small_one_is_whole():
    large, _ = split_drafter(ONE_B, None, 4, seconds_of(TARGET))
    assert large.num_shards == 4
    small = tiny_llama_config()
    chosen, _ = split_drafter(ModelDrafter(small), None, 2, seconds_of(small))
    assert chosen.num_shards == 1


def test_it_is_the_time_of_sums_that_keeps_a_small_drafter_whole(monkeypatch):
    monkeypatch.setattr(drafter_split, "ALL_REDUCE_S", 0.0)
    small = tiny_llama_config()
    chosen, _ = split_drafter(ModelDrafter(small), None, 2, seconds_of(small))
    assert chosen.num_shards == 2


def test_seconds_of_a_draft_token_by_hand():
    whole, quarter = (
        draft_token_s(ONE_B.split(n), TARGET, "bfloat16", V5E, rows=32, context=2048)
        for n in (1, 4)
    )
    work = model_work(ONE_B.config, "bfloat16", 1)
    assert whole == (work.weight_bytes + 32 * 2048 * work.context_bytes) / V5E.bytes_per_s
    assert quarter == pytest.approx(whole / 4 + (2 * 16 + 2) * drafter_split.ALL_REDUCE_S)


def test_speculation_pays_where_a_replicated_drafter_does_not():
    """Llama-3.1-8B with a 1B drafter on v5e 2x2, 32 rows of 2,048 tokens."""
    target = model_work(TARGET, "bfloat16", 4)

    def best(spec):
        works = spec.work(TARGET, "bfloat16")
        step_s = [
            roofline_step_s(target, works, V5E, rows=32, num_speculative_tokens=k, context=2048)
            for k in range(5)
        ]
        k = choose_num_speculative_tokens(step_s, 0.7)
        return k, sum(0.7**i for i in range(k + 1)) / step_s[k]

    k_whole, whole = best(ONE_B)
    k_split, split = best(split_drafter(ONE_B, None, 4, seconds_of(TARGET))[0])
    assert (k_whole, k_split) == (0, 3)
    assert split >= 1.5 * whole


@pytest.mark.parametrize("spec", [EIGHT_HEADS, HybridDrafter(EIGHT_HEADS)], ids=["model", "hybrid"])
def test_bytes_are_those_of_one_device(spec):
    config = EIGHT_HEADS.config
    whole = spec.bytes_per_token(config, "float32")
    assert whole == 2 * config.num_layers * 8 * config.head_dim * 4
    for shards in (2, 4, 8):
        split = spec.split(shards)
        assert split.num_shards == shards
        assert split.bytes_per_token(config, "float32") == whole // shards
        (work,), (own,) = (s.work(config, "float32") for s in (spec, split))
        assert own.weight_bytes == work.weight_bytes / shards
        assert own.context_bytes == work.context_bytes / shards
    assert spec.split(1) == spec


@pytest.mark.parametrize(
    ("spec", "asked", "tensor_shards", "expected", "reason"),
    [
        (EIGHT_HEADS, 1, 8, 1, None),
        (EIGHT_HEADS, 4, 8, 4, None),
        (EIGHT_HEADS, 8, 8, 8, None),
        (TWO_KV_HEADS, 4, 4, 2, "num_kv_heads=2 of the draft model .* split over 2 devices"),
        (HybridDrafter(TWO_KV_HEADS), 8, 8, 2, "num_kv_heads=2 of the draft model"),
        (EIGHT_HEADS, 3, 8, 2, "tensor axis has 8 devices, which it must divide"),
        (EIGHT_HEADS, 4, 1, 1, "tensor axis has 1 devices.* whole on each device"),
        (EIGHT_HEADS, 16, 8, 8, "tensor axis has 8 devices"),
        (NgramDrafter(), 2, 4, 1, "NgramDrafter runs no model"),
        (TapKeeper(NgramDrafter()), 2, 4, 1, "TapKeeper splits no weights"),
        (NoDrafter(), 2, 4, 1, None),
    ],
)
def test_asked_for(spec, asked, tensor_shards, expected, reason):
    split, note = split_drafter(spec, asked, tensor_shards, None)
    assert split.num_shards == expected
    assert type(split) is type(spec)
    if reason is None:
        assert note is None
    else:
        assert note.startswith(f"draft_tensor_parallel_size={asked} is not possible: ")
        assert re.search(reason, note)


def test_on_an_unknown_device_a_drafter_is_whole_unless_it_was_split():
    assert split_drafter(EIGHT_HEADS, None, 8, None)[0].num_shards == 1
    assert split_drafter(EIGHT_HEADS.split(4), None, 8, None)[0].num_shards == 4
    assert split_drafter(EIGHT_HEADS.split(4), 2, 8, None)[0].num_shards == 2


def test_possible_numbers():
    assert possible_shards(EIGHT_HEADS, 8) == [1, 2, 4, 8]
    assert possible_shards(TWO_KV_HEADS, 8) == [1, 2]
    assert possible_shards(EIGHT_HEADS, 6) == [1, 2]  # 6 and 3 divide no 8 heads
    assert possible_shards(NgramDrafter(), 8) == [1]
    with pytest.raises(ValueError, match="num_kv_heads=2 of the draft model is not divisible by"):
        TWO_KV_HEADS.split(4)


@dataclasses.dataclass(frozen=True)
class OfOwn(DrafterSpec):
    """A drafter from outside specjax, which runs a model and says nothing about splitting."""

    config: object = EIGHT_HEADS.config

    @property
    def configs(self):
        return (self.config,)


def test_a_drafter_of_your_own_is_whole():
    split, note = split_drafter(OfOwn(), 4, 8, None)
    assert split == OfOwn()
    assert "OfOwn cannot be split" in note


@pytest.mark.parametrize(("asked", "expected"), [(None, 4), (1, 1), (2, 2)])
def test_a_plan_is_for_the_split_drafter(asked, expected):
    request = PlanRequest(
        target=TARGET,
        target_name="8b",
        drafter=ONE_B,
        drafter_name="1b",
        device=Device("tpu:v5e:2x2", 4, V5E, None),
        dtype="bfloat16",
        num_speculative_tokens=4,
    )
    assert with_split_drafter(request, asked).drafter.num_shards == expected
    with pytest.warns(UserWarning, match="draft_tensor_parallel_size=3 is not possible"):
        assert with_split_drafter(request, 3).drafter.num_shards == 2
    with pytest.raises(ValueError, match="cannot be split over 0 chips"):
        with_split_drafter(request, 0)
