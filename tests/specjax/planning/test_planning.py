"""Plans: names, devices, and figures from memory that was not compiled here."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from pallas_kernels.gpu_targets import TARGETS
from pallas_kernels.implementations import Taken, compiler_platform, target_platform
from specjax.cli import plan_document, plan_report
from specjax.config import batch_size_table
from specjax.config.engine import EngineConfig
from specjax.configs.devices import DEVICES, NVIDIA, of_kind
from specjax.decode.bucket import Bucket, standing_row_buckets
from specjax.decode.config import DecoderConfig
from specjax.decode.decoder import Decoder
from specjax.decode.sizes import Sizes
from specjax.drafters.spec import ModelDrafter, NgramDrafter, NoDrafter
from specjax.models import sharding
from specjax.planning import abstract_decoder, compiled_memory, devices, named_models, plans
from specjax.planning.devices import described, find_device
from specjax.planning.named_models import find_config, find_drafter
from specjax.planning.plan_request import PlanRequest
from specjax.planning.pool_copies import PLAIN, SPECULATING, step_kind
from specjax.planning.workspace_fit import BURST, MIXED, PREFILL, BucketMemory
from specjax.policy import cost_files
from specjax.policy.step_cost import StepCosts
from specjax.trees.static_shapes import from_widths

COPIED = [0.0]  # of the pool, by the steps of `compiled_by_rule`
HELD = [1.0]  # by steps, of the pages' bytes
COPYING = [None]  # the kind of step that does; None: all but prefills
KEYS = {
    "weights_bytes",
    "bytes_per_token",
    "coefficients",
    "num_pages",
    "page_size",
    "weight_limit",
    "gate_tokens",
    "batch_safety_margin",
    "recommended_batch_safety_margin",
    "buckets",
    "num_speculative_tokens_per_batch_size",
    "device",
    "measured",
}


@pytest.fixture(autouse=True)
def no_cuda_plugin(monkeypatch):
    """The CPU's compiler stands in for a GPU's, whatever is installed."""
    monkeypatch.setattr(devices, "described_devices", lambda name, count=1: None)


# One layer of the 8B and one matrix over its vocabulary: 743,452,672 numbers.
ONE_LAYER = ModelDrafter(
    dataclasses.replace(find_config("llama-3.1-8b"), num_layers=1, tie_word_embeddings=True)
)


def request_of(device="gpu:h100", drafter=ONE_LAYER, **changes):
    engine = EngineConfig(max_rows=64, row_buckets=(8,), max_context=8192)
    given = dict(
        target=find_config("llama-3.1-8b"),
        target_name="llama-3.1-8b",
        drafter=find_drafter(drafter) if isinstance(drafter, str) else drafter,
        drafter_name=str(drafter),
        device=find_device(device),
        dtype="bfloat16",
        num_speculative_tokens=4,
        engine=engine,
    )
    return PlanRequest(**{**given, **changes})


@pytest.fixture
def compiled_by_rule(monkeypatch):
    """Steps that need 2 MB per token with logits, 20 kB per other, 5 kB per layer."""

    def copies(bucket):
        if COPYING[0] is not None:
            return step_kind(bucket) == COPYING[0]
        return bucket.kind != PREFILL

    def compile_bucket(decoder, bucket):
        layers, sizes = decoder.target.num_layers, decoder.sizes
        page = 2 * sizes.dtype.itemsize * 8 * 128 * sizes.page_size
        drafted = len(getattr(decoder.drafter, "configs", ()))
        held = sizes.num_pages * page * (layers + drafted)
        scratch = 2_000_000 * bucket.logit_tokens + 5000 * layers
        read = layers + (drafted if bucket.num_speculative_tokens else 0)
        copied = COPIED[0] * page * read * sizes.num_pages
        if bucket.kind != BURST:
            scratch = max(scratch, 20_000 * bucket.tokens + 5000 * layers)
        return BucketMemory(
            bucket=bucket,
            argument_bytes=10**9 + round(HELD[0] * held),
            output_bytes=0,
            temp_bytes=scratch + (round(copied) if copies(bucket) else 0),
            alias_bytes=0,
            code_bytes=1000 * layers,
        )

    monkeypatch.setattr(compiled_memory, "compile_bucket", compile_bucket)


def test_the_8b_counted_by_hand(compiled_by_rule):
    plan = plans.make_plan(request_of())
    assert plan.weights_bytes == 2 * (8_030_261_248 + 743_452_672)
    assert plan.target_bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert plan.drafter_bytes_per_token == 2 * 1 * 8 * 128 * 2
    # Token ids of 64 rows; the rest of the state is small.
    state = plan.resident_bytes - plan.weights_bytes
    assert 64 * 8192 * 4 < state < 64 * 8192 * 4 + 2 * 10**6
    assert plan.memory.free_bytes == 80 * 10**9 - plan.resident_bytes
    step = 2_000_000 * 64 * 5 + 5000 * 32
    code = 1000 * 32 * len(plan.compiled.buckets)
    # The largest step has prompts beside drafts; those not compiled are fitted.
    assert plan.memory.workspace_bytes == pytest.approx(step + code, rel=1e-3)


def test_a_stand_in_compiles_kernels_of_the_gpu_and_branches_of_the_cpu(
    compiled_by_rule, monkeypatch
):
    found, compile_bucket = set(), compiled_memory.compile_bucket

    def noting(decoder, bucket):
        with sharding.lowered(decoder.mesh):
            found.add((target_platform(), compiler_platform()))
        return compile_bucket(decoder, bucket)

    monkeypatch.setattr(compiled_memory, "compile_bucket", noting)
    plans.make_plan(request_of())
    assert found == {("gpu", "cpu")}


def test_a_drafter_counts_in_its_own_dtype(compiled_by_rule):
    alike = plans.make_plan(request_of())
    wider = plans.make_plan(request_of(drafter_dtype="float32"))
    assert wider.weights_bytes == alike.weights_bytes + 2 * 743_452_672
    assert wider.resident_bytes == alike.resident_bytes + 2 * 743_452_672
    assert wider.drafter_works[0].weight_bytes == 2 * alike.drafter_works[0].weight_bytes
    # Its pages are of the target's dtype.
    assert wider.drafter_bytes_per_token == alike.drafter_bytes_per_token


class TwoModels(ModelDrafter):
    """Runs its model twice for each draft token."""

    def work(self, *arguments):
        return 2 * super().work(*arguments)


def test_models_that_a_drafter_runs_add_up(compiled_by_rule):
    one = plans.make_plan(request_of())
    two = plans.make_plan(request_of(drafter=TwoModels(one.request.drafter.config)))
    (work,) = one.drafter_works
    drafted_s = 3 * work.of(8, 8, 1000).seconds(one.request.device.figures)
    assert two.step_s(8, 3, 1000) == pytest.approx(one.step_s(8, 3, 1000) + drafted_s)


def test_trees_are_planned_with_their_slots(compiled_by_rule):
    shape = from_widths([2, 2])  # 6 drafts
    request = request_of(
        target=find_config("demo"),
        drafter=ModelDrafter(find_config("demo-draft"), shape=shape),
        num_speculative_tokens=2,
        engine=EngineConfig(max_rows=4, max_context=64, row_buckets=(), page_size=16),
    )
    assert request.tree_slots == 6
    memory = plans.make_plan(request).memory
    assert memory.num_pages == 4 * 5
    decoder = plans.decoder_of(request, 1, 64)
    assert decoder.sizes.pages_per_row == 5
    assert decoder.sizes.tree_slots == 6


def test_layers_are_extrapolated_and_the_rest_fitted(compiled_by_rule):
    compiled = plans.make_plan(request_of()).compiled
    assert compiled.compiled_layers == (2, 4)
    assert compiled.scratch_per_layer == pytest.approx(5000)
    assert compiled.code_per_layer == pytest.approx(1000)
    assert compiled.pages_ratio == pytest.approx(1)
    for memory in compiled.buckets:
        bucket = memory.bucket
        body = 0 if bucket.kind == BURST else 20_000 * bucket.tokens
        expected = max(2_000_000 * bucket.logit_tokens, body) + 5000 * 32
        assert memory.scratch_bytes == pytest.approx(expected, rel=0.02), bucket


def test_pages_that_seem_smaller_than_they_can_be_count_whole(compiled_by_rule, monkeypatch):
    whole = plans.make_plan(request_of())
    monkeypatch.setattr(f"{__name__}.HELD", [0.8])
    short = plans.make_plan(request_of())
    assert short.compiled.pages_ratio == 1
    assert short.memory == whole.memory
    assert "below the" in short.notes[0]
    monkeypatch.setattr(f"{__name__}.HELD", [1.25])
    padded = plans.make_plan(request_of())
    assert padded.target_bytes_per_token == 1.25 * whole.target_bytes_per_token


def test_copies_of_the_pool_are_counted_with_its_tokens(compiled_by_rule, monkeypatch):
    plain = plans.make_plan(request_of())
    monkeypatch.setattr(f"{__name__}.COPIED", [0.5])
    copying = plans.make_plan(request_of())
    assert copying.compiled.copies.ratio == pytest.approx(0.5)
    assert copying.compiled.scratch_per_layer == pytest.approx(5000)
    assert copying.compiled.buckets == plain.compiled.buckets
    assert copying.target_bytes_per_token == plain.target_bytes_per_token
    ratio = plain.memory.most_tokens / copying.memory.most_tokens
    assert ratio == pytest.approx(1.5, rel=0.01)
    text = plan_report.render(copying)
    for part in (
        "a plain burst 48% of it",
        "a prefill 0% of it",
        "a mixed step 50% of it",
        "a speculating burst 50% of it",
    ):
        assert part in text
    # Each kind once more in a larger pool, and plain bursts of more layers.
    assert copying.compiled.num_executables == plain.compiled.num_executables + 4


@pytest.mark.parametrize("is_cpu, ratio", [(False, 1.0), (True, 0.0)])
def test_speculating_bursts_are_looked_at_though_plain_ones_copy_nothing(
    compiled_by_rule, monkeypatch, is_cpu, ratio
):
    monkeypatch.setattr(f"{__name__}.COPIED", [1.0])
    monkeypatch.setattr(f"{__name__}.COPYING", [SPECULATING])
    monkeypatch.setattr(compiled_memory, "_is_cpu", lambda decoder: is_cpu)
    copies = plans.make_plan(request_of()).compiled.copies
    assert copies.seen[PLAIN] == 0
    assert copies.ratio == pytest.approx(ratio)
    assert set(copies.seen) == ({PLAIN} if is_cpu else {PLAIN, SPECULATING, PREFILL, MIXED})


def test_every_step_of_an_engine_is_planned_and_few_are_compiled(compiled_by_rule):
    compiled = plans.make_plan(request_of()).compiled
    kinds = [memory.bucket.kind for memory in compiled.buckets]
    assert kinds.count(BURST) == 2 * 5
    assert kinds.count(PREFILL) == 3
    assert kinds.count(MIXED) == 3 * 5
    assert len(compiled.samples) == 4 + 3 + 1


def test_row_buckets_that_nobody_named_are_those_that_the_policy_chooses_from(
    compiled_by_rule,
):
    engine = EngineConfig(max_rows=12, max_context=8192)
    counts = lambda **changes: {
        memory.bucket.rows
        for memory in plans.make_plan(request_of(engine=engine, **changes)).compiled.buckets
        if memory.bucket.kind == BURST
    }
    assert counts() == {1, 2, 4, 8, 12}
    samples = plans.make_plan(request_of(engine=engine)).compiled.samples
    assert {s.bucket.rows for s in samples if s.bucket.kind == BURST} == {2, 12}
    assert counts(chooses_rows=False) == {12}
    assert standing_row_buckets(8) == [1, 2, 4, 8]
    assert standing_row_buckets(24, 4) == [4, 8, 16]
    assert standing_row_buckets(1) == [1]


def test_logits_in_chunks_count_once(compiled_by_rule):
    request = request_of()
    few = dataclasses.replace(request.engine, logit_bytes=4 * 128_256 * 100)
    plan = plans.make_plan(dataclasses.replace(request, engine=few))
    buckets = [memory.bucket for memory in plan.compiled.buckets]
    tokens = {b.tokens: b.logit_tokens for b in buckets if b.kind == BURST}
    # 320 tokens in four chunks of 80.
    assert tokens[64 * 5] == 80
    assert tokens[64] == 64


def test_the_document_has_its_keys_and_is_json(compiled_by_rule):
    plan = plans.make_plan(request_of())
    document = json.loads(json.dumps(plan_document.to_dict(plan)))
    assert set(document) >= KEYS
    assert document["measured"] is False
    assert document["bytes_per_token"] == {"target": 131_072, "drafter": 4096}
    assert document["gate_tokens"] == plan.memory.gate_tokens
    table = batch_size_table.parse(document["num_speculative_tokens_per_batch_size"])
    assert table[0].first == 1
    assert table[-1].last == 64
    by_batch = document["num_speculative_tokens_by_batch_and_context"]
    for rows, by_context in by_batch.items():
        own = by_context["2048"]
        assert own == batch_size_table.look_up(table, int(rows))
    text = plan_report.render(plan)
    assert "compiled for 2 layers, one also for 4, and extrapolated to 32" in text
    assert "a CPU's stands in, with weights, pages and activations in float32" in text


def test_k_falls_with_rows_and_is_0_above_the_gate(compiled_by_rule):
    plan = plans.make_plan(request_of())
    chosen = [plan.choose(rows, 2048) for rows in (1, 8, 64)]
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] > 0
    gate = plan.memory.gate_tokens
    assert plan.choose(64, gate // 64 + 1) == 0
    without = dataclasses.replace(plan, memory=None)
    assert without.choose(64, gate // 64 + 1) > 0


def test_largest_batch_by_context(compiled_by_rule):
    plan = plans.make_plan(request_of())
    largest = plan_document.to_dict(plan)["largest_batch_by_context"]
    assert list(largest) == ["512", "2048", "8192"]
    for context, rows in largest.items():
        assert rows == min(64, plan.memory.most_tokens // int(context))


def test_without_a_memory_figure_there_are_no_limits(compiled_by_rule):
    plan = plans.make_plan(request_of(device="cpu", drafter="ngram"))
    document = plan_document.to_dict(plan)
    for name in ("num_pages", "weight_limit", "gate_tokens"):
        assert document[name] is None
    assert document["num_speculative_tokens_per_batch_size"] is None
    assert any("give --memory-bytes" in note for note in document["notes"])
    assert "give --memory-bytes" in plan_report.render(plan)
    assert document["bytes_per_token"]["drafter"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", jnp.bfloat16])
def test_a_peak_of_another_dtype_is_said(compiled_by_rule, dtype):
    document = plan_document.to_dict(plans.make_plan(request_of(dtype=dtype)))
    is_said = any("peak of bfloat16" in note for note in document["notes"])
    assert is_said == (dtype == "float32")


def test_pages_and_gate_that_were_asked_for(compiled_by_rule):
    request = request_of()
    engine = dataclasses.replace(request.engine, num_pages=500, gate="worst_case")
    asked = dataclasses.replace(request, engine=engine)
    document = plan_document.to_dict(plans.make_plan(asked))
    assert (document["num_pages"], document["gate"]) == (500, "worst_case")
    assert any("may ever have" in note for note in document["notes"])
    plain = plan_document.to_dict(plans.make_plan(request))
    assert not any("may ever have" in note for note in plain["notes"])


def test_step_costs_that_were_kept_are_named(compiled_by_rule, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE_DIR", str(tmp_path))
    request = request_of(device="cpu", drafter="ngram", dtype="float32")
    notes = lambda: plan_document.to_dict(plans.make_plan(request))["notes"]
    command = "specjax bench --calibrate --target llama-3.1-8b --drafter ngram"
    assert f"to measure this pair's steps on this machine: {command}" in notes()
    costs = StepCosts()
    costs.observe(Bucket(64, 0), 100, 1e-3)
    # What an engine of this pair runs, of other rooms than the plan's.
    sizes = Sizes(rows=4, page_size=16, num_pages=9, pages_per_row=2, burst_steps=8)
    sizes = dataclasses.replace(sizes, dtype=jnp.dtype("float32"))
    path = cost_files.save(
        Decoder(
            DecoderConfig(
                target=request.target, drafter=request.drafter, sizes=sizes, engine=EngineConfig()
            )
        ),
        cost_files.Known(costs),
    )
    (note,) = [note for note in notes() if command in note]
    assert f"an engine chooses K by them ({path})" in note
    request = request_of(device="cpu", drafter="none", dtype="float32")
    assert not any("calibrate" in note for note in notes())


def test_a_model_that_does_not_fit(compiled_by_rule):
    request = request_of()
    tight = dataclasses.replace(request.engine, memory_bytes=17 * 10**9)
    with pytest.raises(ValueError, match=r"17\.00 GB of each chip"):
        plans.make_plan(dataclasses.replace(request, engine=tight))


@pytest.mark.parametrize("memory_bytes", [1, 10**6, 17 * 10**9, 17_560_000_000])
def test_memory_that_cannot_do_is_refused_before_anything_is_compiled(monkeypatch, memory_bytes):
    monkeypatch.setattr(compiled_memory, "compiled", lambda *step: pytest.fail("late"))
    request = request_of()
    tight = dataclasses.replace(request.engine, memory_bytes=memory_bytes)
    with pytest.raises(ValueError, match="raise memory_bytes"):
        plans.make_plan(dataclasses.replace(request, engine=tight))


def test_a_split_target_counts_once_and_a_replicated_drafter_on_every_chip(
    compiled_by_rule,
):
    request = request_of(device="gpu:h100")
    device = find_device("gpu:h100", 2)
    assert isinstance(device.mesh, Mesh)
    plan = plans.make_plan(dataclasses.replace(request, device=device))
    tokens = plan_document.to_dict(plan)["bytes_per_token"]
    assert plan.drafter_bytes_per_token == pytest.approx(plan.target_bytes_per_token / 32 * 2)
    assert tokens["drafter"] == pytest.approx(tokens["target"] / 32 * 2)
    # Norms lie on both chips, all other weights of the target are split.
    whole = 2 * 65 * 4096
    target = 2 * 8_030_261_248
    drafter = 2 * 743_452_672
    state = plan.resident_bytes - (target - whole) // 2 - whole - drafter
    assert 64 * 8192 * 4 < state < 64 * 8192 * 4 + 2 * 10**6

    # A drafter over both chips: half of its weights and pages on each, its norms on both.
    halved = dataclasses.replace(plan.request, drafter=plan.request.drafter.split(2))
    split = plans.make_plan(halved)
    # The stand-in for the compiler holds whole pages on each chip: by as much it finds more.
    counted = lambda of, name: getattr(of, f"{name}_bytes_per_token") / of.compiled.pages_ratio
    assert counted(split, "drafter") == counted(plan, "drafter") / 2 == 2 * 8 * 128 * 2 / 2
    assert counted(split, "target") == counted(plan, "target")
    assert split.weights_bytes == plan.weights_bytes
    (config,) = halved.drafter.configs
    norms = 2 * (2 * config.num_layers + 1) * config.hidden_size
    saved = plan.resident_bytes - split.resident_bytes
    assert saved == (drafter - norms) // 2


# The CPU's compiler in place of a GPU's


def test_a_stand_in_compiles_float32_and_counts_bfloat16(compiled_by_rule):
    request = request_of()
    kernels = {"tree_attention": "mosaic_gpu"}
    request = dataclasses.replace(
        request,
        drafter_params={"w": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)},
        engine=dataclasses.replace(request.engine, kernels=kernels, num_pages=64),
    )
    seen = request.as_compiled()
    assert (seen.dtype, seen.drafter_dtype, seen.engine.kernels) == ("float32", "float32", ())
    assert seen.drafter_params["w"].dtype == jnp.float32
    assert request.device.platform == "cpu"
    assert request.device.traced_for == "gpu"
    on_cpu = request_of(device="cpu", dtype="bfloat16")
    assert on_cpu.as_compiled() is on_cpu
    plan = plans.make_plan(request_of())
    # Weights, pages and the policy's roofline are of bfloat16.
    assert plan.compiled.pages_ratio == 1.0
    assert plan.target_bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert plan.weights_bytes == 2 * (8_030_261_248 + 743_452_672)


def test_copies_of_a_stand_in_count_in_the_pages_own_dtype(compiled_by_rule):
    """Pages, weights and copies are those of steps that were compiled in bfloat16."""
    request = request_of()
    own = dataclasses.replace(request.device, is_compiled_for=True)
    COPIED[0] = 1.0
    try:
        standing_in = plans.make_plan(request)
        compiled = plans.make_plan(dataclasses.replace(request, device=own))
    finally:
        COPIED[0] = 0.0
    assert standing_in.compiled.copies.ratio == pytest.approx(1.0)
    assert standing_in.memory.num_pages == compiled.memory.num_pages
    assert standing_in.memory.next_token == pytest.approx(compiled.memory.next_token)
    assert standing_in.resident_bytes == compiled.resident_bytes


@pytest.mark.full
def test_a_stand_in_does_not_copy_all_weights():
    """In bfloat16 a CPU's burst holds every weight a second time, in float32."""
    shape = dict(target=find_config("demo"), target_name="demo", drafter=NoDrafter())
    engine = EngineConfig(max_rows=2, max_context=64, burst_steps=2)
    request = request_of(**shape, engine=engine, num_speculative_tokens=0)
    temp = {}
    for name, own in (("as it is", request), ("stand-in", request.as_compiled())):
        decoder = plans.decoder_of(own, 2, 64)
        bucket = compiled_memory.burst_bucket(decoder, 0)
        temp[name] = compiled_memory.compile_bucket(decoder, bucket).temp_bytes
    decoder = plans.decoder_of(request, 2, 64)
    weights = jax.tree.leaves(decoder.abstract_params.target)
    widened = 4 * sum(leaf.size for leaf in weights)
    assert temp["as it is"] > 0.8 * widened
    assert temp["stand-in"] < 0.2 * widened


def test_a_gpus_own_compiler_is_used_where_it_is_installed(compiled_by_rule, monkeypatch):
    device = type("Device", (), dict(platform="gpu", device_kind="NVIDIA H100"))()
    monkeypatch.setattr(devices, "described_devices", lambda name, count=1: [device])
    monkeypatch.setattr(devices, "Mesh", lambda devices, axes: FakeMesh(devices))
    found = find_device("gpu:h100")
    assert found.is_compiled_for
    assert found.platform == found.traced_for == "gpu"
    request = request_of(device="cpu")
    own = dataclasses.replace(request, device=found)
    assert own.as_compiled() is own


class FakeMesh:
    def __init__(self, devices):
        self.devices = devices


@pytest.mark.full
def test_a_plan_compiled_for_a_gpu(monkeypatch):
    monkeypatch.undo()
    if devices.described_devices("h100") is None:
        pytest.skip('no CUDA plugin of jax is installed (pip install "jax[cuda12]")')
    request = request_of(
        target=find_config("demo"),
        drafter=NoDrafter(),
        num_speculative_tokens=0,
        engine=EngineConfig(max_rows=2, max_context=64, burst_steps=2, row_buckets=()),
    )
    assert request.device.platform == "gpu"
    document = plan_document.to_dict(plans.make_plan(request))
    assert document["compiled"]["for"] == "gpu:h100"
    assert not any("stands in" in note for note in document["notes"])


# Names


def test_names_of_models():
    assert find_config("llama-3.1-8b") == find_config("llama_3_1_8b")
    assert find_config("demo").num_layers == 8
    assert find_drafter("demo") == ModelDrafter(find_config("demo-draft"))
    # A draft model is loaded in the target's vocabulary.
    wider = dataclasses.replace(find_config("demo"), vocab_size=12_345)
    own = dataclasses.replace(find_config("demo-draft"), vocab_size=12_345)
    assert find_drafter("demo", wider) == ModelDrafter(own)
    assert find_drafter("ngram") == NgramDrafter()
    assert find_drafter(None) == find_drafter("none") == NoDrafter()
    with pytest.raises(FileNotFoundError, match="no known shape"):
        find_config("no-such-model")


def test_names_of_heads():
    target = find_config("llama-3.1-8b")
    head = find_drafter("llama-3.1-8b-eagle3", target)
    assert head.taps == (2, 16, 29)
    assert find_drafter("llama_3_1_8b_dflash", target).taps == (2, 9, 16, 23, 30)
    weights = jax.tree.leaves(head.abstract_params(target, jnp.bfloat16))
    # Three states to one, attention over two of them, MLP, head, norms; and ids of its tokens.
    by_hand = 3 * 4096**2 + 4 * 4096**2 + 3 * 4096 * 14_336 + 32_000 * 4096 + 4 * 4096
    assert sum(leaf.size for leaf in weights) == by_hand + 32_000
    with pytest.raises(ValueError, match="the head is for a target of 4096 hidden numbers"):
        find_drafter("llama-3.1-8b-eagle3", find_config("qwen3-0.6b"))
    with pytest.raises(FileNotFoundError, match=r"did you mean 'llama-3\.1-8b-eagle3'"):
        find_drafter("llama-3.1-8b-eagel3", target)


def test_a_folder_needs_no_weights(tmp_path):
    shape = dict(
        model_type="llama",
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert find_config(tmp_path).vocab_size == 96


@pytest.mark.parametrize(
    "name",
    ["cuda", "tpu:v9:2x2", "gpu:v2", "cpu:2", "cpu:", "gpu:h100:2x2", "tpu", "v5e:2x2:1", ""],
)
def test_unknown_devices(name):
    with pytest.raises(ValueError, match=r"is unknown.*; expected cpu"):
        find_device(name)


def test_devices_by_any_of_their_names():
    wanted = {
        "h100": ("gpu:h100", 1),
        "H100": ("gpu:h100", 1),
        "a100": ("gpu:a100", 1),
        "a100-80gb": ("gpu:a100", 1),
        "gpu:a100-40gb": ("gpu:a100-40gb", 1),
        "v5e": ("tpu:v5e", 1),
        "tpu:v5e": ("tpu:v5e", 1),
        "v5e:2x2": ("tpu:v5e:2x2", 4),
        "tpu:v6e:2x4": ("tpu:v6e:2x4", 8),
        "v5p": ("tpu:v5p", 1),
        "v4:2x2x1": ("tpu:v4:2x2x1", 4),
        "tpu7x:2x2x1": ("tpu:tpu7x:2x2x1", 8),
        "cpu": ("cpu", 1),
    }
    found = {name: described(name) for name in wanted}
    assert {name: (device.name, device.count) for name, device in found.items()} == wanted
    assert found["tpu7x:2x2x1"].figures == DEVICES["tpu7x"].per_device()
    assert [found[name].traced_for for name in ("h100", "v5e", "cpu")] == ["gpu", "tpu", "cpu"]
    assert described("v5e", 4).count == described("h100", 4).count == 4


@pytest.mark.parametrize(
    ("name", "meant"),
    [("h10", "h100"), ("gpu:h20", "gpu:h200"), ("tpu:v6", "tpu:v6e"), ("gpu:v5e", "tpu:v5e")],
)
def test_a_misspelt_device(name, meant):
    with pytest.raises(ValueError, match=f"is unknown .did you mean '{meant}'"):
        described(name)


@pytest.mark.parametrize("name", ["gpu:v5e", "gpu:tpu7x", "tpu:h100:2x2", "tpu:a100"])
def test_a_tpu_is_no_gpu(name):
    with pytest.raises(ValueError, match=r"a GPU of t4, .*, b200, or a TPU of v4"):
        find_device(name)


@pytest.mark.parametrize("shape", [":", ":2y2", ":4", ":2x", ":0x2", ":2x2x2x2"])
def test_topologies_that_are_none(shape):
    with pytest.raises(ValueError, match="expected chips along two or three axes"):
        find_device("tpu:v5e" + shape)


@pytest.mark.parametrize("name", ["cpu", "gpu:h100", "tpu:v5e:2x2"])
@pytest.mark.parametrize("num_chips", [0, -1])
def test_fewer_than_one_chip(name, num_chips):
    with pytest.raises(ValueError, match=f"over {num_chips} chips; expected at least"):
        find_device(name, num_chips)


def test_a_tpu_without_a_topology_is_compiled_for_as_one_host(monkeypatch):
    meshes = []
    monkeypatch.setattr(abstract_decoder, "described_mesh", lambda *asked: meshes.append(asked))
    for name in ("v5e", "tpu:v4", "v6e:2x4"):
        find_device(name)
    assert meshes == [("v5e:2x2", 1), ("v4:2x2x1", 1), ("v6e:2x4", 8)]


def test_more_chips_than_there_are_to_compile_for():
    with pytest.raises(ValueError, match="xla_force_host_platform_device_count=64"):
        find_device("gpu:h100", 64)


def test_kinds_of_gpus_that_begin_alike():
    assert of_kind("NVIDIA L4") == DEVICES["l4"]
    assert of_kind("NVIDIA L40S") is None
    assert of_kind("NVIDIA A100-SXM4-40GB").memory_bytes == 40 * 10**9
    assert of_kind("NVIDIA A100-SXM4-80GB").memory_bytes == 80 * 10**9
    assert not of_kind("Tesla T4").has_bfloat16
    gpus = {name for name, figures in DEVICES.items() if figures.vendor == NVIDIA}
    assert gpus == set(TARGETS)
    for name, target in TARGETS.items():
        own = of_kind(target.kind)
        assert own is DEVICES[name]
        assert (own.memory_bytes, own.bytes_per_s) == (target.memory_bytes, target.bytes_per_s)
        assert own.has_bfloat16 == (target.capability >= (8, 0))


def test_figures_of_devices():
    for name, figures in DEVICES.items():
        assert " https://" in figures.source, name
        assert 10 < figures.ridge < 1000, name
    half = DEVICES["tpu7x"].per_device()
    assert half.memory_bytes * 2 == DEVICES["tpu7x"].memory_bytes
    assert half.ridge == pytest.approx(DEVICES["tpu7x"].ridge)


def test_requests_that_contradict():
    with pytest.raises(ValueError, match="vocabularies of 128256 and 4096"):
        request_of(drafter="demo")
    with pytest.raises(ValueError, match="acceptance_rate"):
        request_of(acceptance_rate=1.5)
    for k in (-1, 64):
        with pytest.raises(ValueError, match=f"num_speculative_tokens={k} must be"):
            request_of(num_speculative_tokens=k)


def test_a_picture(compiled_by_rule, tmp_path):
    pytest.importorskip("matplotlib")
    plan = plans.make_plan(request_of())
    plan_report.draw(plan, tmp_path / "k.png")
    assert (tmp_path / "k.png").read_bytes().startswith(b"\x89PNG")


def test_work_of_a_forward_counted_by_hand():
    request = request_of()
    work = plans.model_work(request.target, request.dtype, 4)
    products = 8_030_261_248 - 128_256 * 4096  # embeddings are looked up
    assert work.weight_bytes == products * 2 / 4
    assert work.token_flops == products * 2 / 4
    assert work.context_bytes == 131_072 / 4
    assert work.context_flops == 4 * 32 * 32 * 128 / 4
    assert np.dtype(jnp.bfloat16).itemsize == 2


def test_keys_and_values_in_one_byte(compiled_by_rule):
    """Half of bfloat16's bytes of context: a page as counted, and the roofline."""
    engine = dataclasses.replace(request_of().engine, kv_cache_dtype="fp8", page_size=32)
    assert plans.page_bytes(request_of(engine=engine)) == (32 * 131_072 // 2, 32 * 4096)
    plan = plans.make_plan(request_of(engine=engine))
    assert plan.target_work.context_bytes == 131_072 / 2
    assert plan_document.to_dict(plan)["kv_cache_dtype"] == "fp8"
    assert plan_document.to_dict(plans.make_plan(request_of()))["kv_cache_dtype"] == "bfloat16"


def test_layers_that_slide_are_charged_their_windows():
    request = request_of()
    windows = (None, 4096) * 16
    target = dataclasses.replace(request.target, layer_windows=windows)
    work = plans.model_work(target, request.dtype, 1)
    assert work.seen(8192) == (8192 + 4096) / 2


def test_a_plan_has_pages_for_its_device():
    engine = EngineConfig(max_rows=32, max_context=131_072)
    assert request_of("cpu", engine=engine).engine.page_size == 16
    assert request_of("gpu:h100", engine=engine).engine.page_size == 64
    assert request_of("gpu:h100", engine=EngineConfig(page_size=32)).engine.page_size == 32


@pytest.mark.full
def test_kernels_in_use_are_those_of_the_platform():
    small = find_config("demo").first_layers(1)
    request = request_of("cpu", "ngram", target=small, dtype="float32", engine=EngineConfig())
    taken = {one.op: one for one in plans.kernels_in_use(request)}
    assert set(taken) == {"tree_attention", "write_kv", "seeded_sample", "ngram_match"}
    assert all(one == Taken(op, "xla") for op, one in taken.items())
    assert plans._kernel_notes(tuple(taken.values())) == []


def test_a_kernel_that_cannot_be_used_is_named_with_its_setting():
    pytest.importorskip("libtpu")
    device = find_device("tpu:v5e:2x2")
    target = find_config("llama-3.1-8b").first_layers(2)
    context = EngineConfig(max_rows=32, max_context=131_072)
    request = PlanRequest(
        target=target,
        target_name="llama",
        drafter=find_drafter(None),
        drafter_name="none",
        device=device,
        dtype="bfloat16",
        num_speculative_tokens=0,
        engine=context,
    )
    assert request.engine.page_size == 128
    assert plans.kernels_in_use(request) == (
        Taken("seeded_sample", "xla"),  # each chip samples from its slice of the vocabulary
        Taken("tree_attention", "mosaic_tpu"),
        Taken("write_kv", "mosaic_tpu"),
    )
    small = dataclasses.replace(request, engine=dataclasses.replace(context, page_size=8))
    (note,) = [
        note
        for note in plans._kernel_notes(plans.kernels_in_use(small))
        if note.startswith("tree_attention")
    ]
    assert "runs as xla" in note
    assert "page_size" in note


def test_embedded_heads_are_planned_by_name():
    target = named_models.find_config("demo")
    for name in ("demo-eagle3", "demo-dspark"):
        assert named_models.find_drafter(name, target).taps
