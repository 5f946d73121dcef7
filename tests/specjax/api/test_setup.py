"""Settled before the first request: what fits, and a device with less than was thought."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ENGINE, tiny_llama
from jax.sharding import Mesh

import specjax
from specjax.api.assemble import FEWER_PAGES, GREEDY, SAMPLED, Setup
from specjax.api.sizing import page_bytes
from specjax.config.engine import EngineConfig
from specjax.config.rules import Rule
from specjax.config.sampling import SamplingParams
from specjax.decode.bucket import Bucket
from specjax.decode.decoder import Decoder
from specjax.drafters.spec import NgramDrafter
from specjax.heads.loading import LoadedDrafter
from specjax.planning import compiled_memory, plans
from specjax.planning.abstract_decoder import AbstractDecoder
from specjax.planning.compiled_memory import burst_bucket, compile_bucket
from specjax.planning.device_memory import bytes_on
from specjax.planning.memory_model import MemoryLimits, plan_memory
from specjax.planning.workspace_fit import BURST, BucketMemory, StepShape
from specjax.policy import cost_files
from specjax.policy.goodput import Goodput
from specjax.policy.interface import Fixed
from specjax.policy.shelf import forget_speed
from specjax.policy.step_cost import StepCosts
from specjax.types import BLOCK, SEEDED

NUM_PAGES = 100


@pytest.fixture
def setup():
    return Setup.of("demo", engine=EngineConfig(num_pages=NUM_PAGES, max_context=64))


def loop_of(setup, monkeypatch, *, most_pages, message="RESOURCE_EXHAUSTED: 9 GB."):
    """Returns a loop on a device that has room for most_pages."""
    init = Decoder.init

    def init_if_there_is_room(decoder, **options):
        if decoder.sizes.num_pages > most_pages:
            raise jax.errors.JaxRuntimeError(message)
        return init(decoder, **options)

    monkeypatch.setattr(Decoder, "init", init_if_there_is_room)
    return setup.for_run([]).loop(setup.standing_sizes(), [], on_progress=lambda *report: None)


def test_pages_that_do_not_fit_become_fewer(setup, monkeypatch):
    with pytest.warns(UserWarning, match="pages do not fit") as warned:
        loop = loop_of(setup, monkeypatch, most_pages=60)
    first = int(FEWER_PAGES * NUM_PAGES)
    assert [str(warning.message).split()[0] for warning in warned] == ["100", "75"]
    assert loop.scheduler.pools[0].num_pages == int(FEWER_PAGES * first) == 56
    loop.scheduler.check()


def memory_plan(num_pages):
    """Returns a plan of ample memory, and pages that are fewer than rows can hold."""
    limits = MemoryLimits(
        free_bytes=10**9, page_size=16, rows=32, max_context=64, num_pages=num_pages
    )
    step = BucketMemory(
        bucket=StepShape(kind=BURST, rows=32, tokens=32),
        argument_bytes=0,
        output_bytes=0,
        temp_bytes=10**6,
        alias_bytes=0,
        code_bytes=0,
    )
    return plan_memory(limits, 256, [step])


def test_fewer_pages_close_the_gate_earlier(setup, monkeypatch):
    plan = memory_plan(NUM_PAGES)
    monkeypatch.setattr(Setup, "memory", plan)
    assert plan.gate_tokens == int(0.75 * NUM_PAGES * 16)
    with pytest.warns(UserWarning, match="pages do not fit"):
        loop = loop_of(setup, monkeypatch, most_pages=60)
    assert loop.scheduler.pools[0].num_pages == 56
    assert loop.gate.max_tokens == int(0.75 * 56 * 16)


def test_too_few_for_one_request_are_not_tried(setup, monkeypatch):
    needed = setup.standing_sizes().pages_per_row
    with (
        pytest.warns(UserWarning, match="pages do not fit"),
        pytest.raises(jax.errors.JaxRuntimeError, match="9 GB"),
    ):
        loop_of(setup, monkeypatch, most_pages=needed - 1)


def test_another_error_is_not_taken_for_memory(setup, monkeypatch):
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        loop_of(setup, monkeypatch, most_pages=0, message="INTERNAL: other")


@pytest.fixture
def requests(monkeypatch):
    """Plans that are asked for, and not made."""
    asked = []

    def make_plan(request):
        asked.append(request)
        return types.SimpleNamespace(memory=memory_plan(NUM_PAGES), notes=())

    monkeypatch.setattr(plans, "make_plan", make_plan)
    return asked


def test_what_steps_verify_by_is_planned_for(requests):
    model = tiny_llama(0)
    setup = Setup.of(
        model,
        drafter=model,
        num_speculative_tokens=3,
        speculative_config={"max_drafts_per_step": 4},
        engine=EngineConfig(memory_bytes=10**9),
    )
    assert setup.for_run([SEEDED, BLOCK]).memory is not None
    assert requests[0].rules == (BLOCK,)
    assert requests[0].max_drafts_per_shard == 4
    decoder = plans.decoder_of(requests[0], 1, 64)
    assert decoder.config.rules == (BLOCK,)
    assert decoder.config.max_drafts_per_shard == 4
    assert setup.for_run([SEEDED]).memory is not None
    assert requests[1].rules == ()


def test_a_policy_beside_the_name_of_another_is_refused():
    setup = Setup.of(tiny_llama(0), drafter="ngram", speculative_config={"policy": "fixed"})
    with pytest.raises(ValueError, match=r"policy= is a Fixed, .*another policy, 'fixed'; leave"):
        setup.for_run([SEEDED], Fixed(2))


@pytest.mark.goodput
@pytest.mark.parametrize(
    "speculation, policy, expected",
    [
        ({}, None, True),
        ({"policy": "goodput"}, None, True),
        ({"policy": "fixed"}, None, False),
        ({"num_speculative_tokens_per_batch_size": [[1, 8, 2]]}, None, False),
        ({"verification": "rejection"}, None, False),
        ({"num_speculative_tokens": 0}, None, False),
        ({}, Fixed(2), False),
        ({}, Goodput(2), True),
    ],
)
def test_row_buckets_are_planned_where_the_policy_chooses_them(
    requests, speculation, policy, expected
):
    model = tiny_llama(0)
    setup = Setup.of(
        model,
        drafter=model,
        speculative_config={"num_speculative_tokens": 2, **speculation},
        engine=EngineConfig(memory_bytes=10**9),
    )
    rule = Rule.of(setup.speculation.verification)
    setup = setup.for_run([rule], policy)
    assert setup.memory is not None
    assert requests[0].chooses_rows == expected
    if policy is None:
        decoder = setup.decoder(setup.standing_sizes(), [rule])
        chosen = setup.policy(decoder)
        assert chosen.chooses_rows == expected


@pytest.mark.parametrize("asked, expected", [(None, 100), (40 * 16 * 256, 40), (10**9, 100)])
def test_bytes_for_pages_that_were_asked_for_are_not_exceeded(monkeypatch, asked, expected):
    engine = EngineConfig(kv_cache_bytes=asked, max_context=64, memory_bytes=10**9)
    setup = Setup.of(tiny_llama(0), engine=engine)
    monkeypatch.setattr(Setup, "memory", memory_plan(NUM_PAGES))
    sizes = setup.standing_sizes()
    assert sizes.num_pages == expected
    assert setup.for_run([])._gate(sizes).max_tokens == int(0.75 * expected * 16)


def test_without_a_plan_pages_take_a_gibibyte_at_most():
    setup = Setup.of(tiny_llama(0), engine=EngineConfig(max_rows=10**4))
    assert setup.standing_sizes().num_pages == 2**30 // (16 * 256)


def starts():
    """Everything that takes an EngineConfig, as far as it goes before it compiles."""
    model = tiny_llama(0)
    return {
        "generate": lambda engine: specjax.generate(model, [1, 2], engine=engine),
        "Engine": lambda engine: specjax.Engine(model, engine=engine),
        "rollouts": lambda engine: specjax.build_decoder(model, engine=engine),
    }


@pytest.fixture
def no_compile(monkeypatch):
    refuse = lambda *arguments, **options: pytest.fail("something was compiled")
    monkeypatch.setattr(compiled_memory, "compiled", refuse)
    monkeypatch.setattr(Decoder, "init", refuse)


@pytest.mark.parametrize("start", ["generate", "Engine", "rollouts"])
@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"memory_bytes": 1}, "raise memory_bytes"),
        ({"memory_bytes": 10**5}, "weights and state take"),
        ({"memory_bytes": 10**15}, "more than the 64.00 GB that the device has"),
        ({"kv_cache_bytes": 4095}, "holds no page: a page of 16 tokens takes 4,096 b"),
        ({"num_pages": 10**8}, "num_pages=100000000 take 409.60 GB of a device"),
    ],
)
def test_budgets_that_cannot_be_are_refused_at_once(
    no_compile, monkeypatch, start, engine, message
):
    monkeypatch.setattr("specjax.api.assemble.total_bytes", lambda device: 64 * 10**9)
    with pytest.raises(ValueError, match=message):
        starts()[start](EngineConfig(**engine))


@pytest.mark.parametrize("engine", [{"max_logprobs": 2**20}, {"num_pages": 500}])
def test_a_state_larger_than_the_device_is_refused(no_compile, monkeypatch, engine):
    monkeypatch.setattr("specjax.api.assemble.total_bytes", lambda device: 2_100_000)
    with pytest.raises(ValueError, match=r"of a device that has 2\.10 MB; lower max_rows"):
        specjax.Engine(tiny_llama(0), engine=EngineConfig(**engine))


def test_a_page_for_each_data_shard():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    for engine in ({"num_pages": 1}, {"kv_cache_bytes": 4096}):
        with pytest.raises(ValueError, match="for each of 2 data shards"):
            Setup.of(tiny_llama(0), engine=EngineConfig(**engine), mesh=mesh)


def test_an_engine_config_may_be_a_mapping():
    setup = Setup.of(tiny_llama(0), engine={"max_rows": 3, "page_size": 8})
    assert setup.engine == EngineConfig(max_rows=3, page_size=8)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"max_row": 3}, "did you mean max_rows=3"),
        ({"max_rows": 0}, "EngineConfig.max_rows=0"),
        (8, "engine=8 must be an EngineConfig or a mapping"),
    ],
)
def test_what_is_no_engine_config(engine, message):
    with pytest.raises(ValueError, match=message):
        Setup.of(tiny_llama(0), engine=engine)


def test_what_is_no_mesh():
    with pytest.raises(ValueError, match=r"mesh='tpu' must be a jax.sharding.Mesh"):
        Setup.of(tiny_llama(0), mesh="tpu")


def test_a_context_beyond_the_models_is_said():
    with pytest.warns(UserWarning, match="max_context=513 is more than the 512 tokens"):
        setup = Setup.of(tiny_llama(0), engine=EngineConfig(max_context=513))
    assert setup.standing_sizes().max_length == 512


def test_memory_over_a_data_axis_is_not_planned_and_says_so():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    engine = EngineConfig(memory_bytes=10**9)
    with pytest.warns(UserWarning, match=r"no effect over the mesh's 2 data shards"):
        assert Setup.of(tiny_llama(0), engine=engine, mesh=mesh).memory is None


def test_what_devices_report_is_not_asked_over_a_data_axis(monkeypatch):
    reporting(monkeypatch, {"bytes_limit": 9000})
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    assert Setup.of(tiny_llama(0), mesh=mesh).with_reported_memory().memory is None


def reporting(monkeypatch, stats):
    """Makes setups run on a device of some memory_stats(), where the weights lie."""
    device = types.SimpleNamespace(platform="cpu", memory_stats=lambda: stats)
    monkeypatch.setattr(Setup, "_devices", [device])
    monkeypatch.setattr("specjax.api.assemble.bytes_on", lambda device, arrays: 1024)


@pytest.mark.parametrize(
    "stats, expected",
    [
        (None, None),
        ({}, None),
        ({"bytes_limit": 9216}, 9216),
        ({"bytes_limit": 9216, "bytes_in_use": 1000}, 9216),
        ({"bytes_limit": 9216, "bytes_in_use": 3560}, 6656),
        ({"bytes_limit": 9216, "bytes_in_use": 400}, 9216),
    ],
)
def test_what_others_hold_of_a_device_is_not_ours(setup, monkeypatch, stats, expected):
    reporting(monkeypatch, stats)
    assert setup.with_reported_memory().engine.memory_bytes == expected


ROW_BYTES = 256 * 256  # of the pages of 256 tokens of tiny_llama: the smallest capacity of a row


@pytest.mark.parametrize(
    ("stats", "num_prompts", "engine", "expected"),
    [
        ({"bytes_limit": 9216}, 1, {}, None),  # one row fits into the default pool
        ({"bytes_limit": 9216}, 3, {}, 9216),  # four rows do not
        ({"bytes_limit": 9216, "bytes_in_use": 3560}, 3, {}, 6656),
        ({"bytes_limit": 9216}, 3, {"num_pages": 4}, None),
        ({"bytes_limit": 9216}, 3, {"kv_cache_bytes": ROW_BYTES}, None),
        ({"bytes_limit": 9216}, 3, {"memory_bytes": 7000}, 7000),
        ({"bytes_limit": 9216}, 3, {"max_rows": 1}, None),
        (None, 3, {}, None),  # a CPU reports none
    ],
)
def test_requests_that_need_more_than_the_default_pool_get_what_the_device_has(
    monkeypatch, stats, num_prompts, engine, expected
):
    reporting(monkeypatch, stats)
    monkeypatch.setattr("specjax.api.sizing.KV_CACHE_BYTES", ROW_BYTES)
    model = tiny_llama(0)
    setup = Setup.of(model, engine=EngineConfig(page_size=16))
    of_page = page_bytes(setup._pooled, setup.engine, setup._dtype)
    assert of_page * 16 == ROW_BYTES
    if engine:
        config = dataclasses.replace(setup.engine, **engine)
        setup = dataclasses.replace(setup, engine=config)
    requests, _ = setup.requests([[1, 2, 3]] * num_prompts, SamplingParams(max_tokens=4))
    monkeypatch.setattr(Setup, "memory", None)
    planned = setup.for_run([]).with_memory_for(requests)
    assert planned.engine.memory_bytes == expected


@pytest.mark.full
def test_a_request_that_is_longer_than_the_default_pool_is_served(monkeypatch):
    monkeypatch.setattr("specjax.api.sizing.KV_CACHE_BYTES", ROW_BYTES)
    model, prompt = tiny_llama(0), [[1] * 400]
    sampling = SamplingParams(max_tokens=4)
    engine = EngineConfig(page_size=16)
    with pytest.raises(ValueError, match="the pool holds 256 for one request"):
        specjax.generate(model, prompt, sampling=sampling, engine=engine)
    reporting(monkeypatch, {"bytes_limit": 10**9})
    monkeypatch.setattr(Setup, "memory", memory_plan(NUM_PAGES))
    (served,) = specjax.generate(model, prompt, sampling=sampling, engine=engine)
    assert len(served.token_ids) == 4


def test_bytes_that_were_given_are_kept(setup, monkeypatch):
    reporting(monkeypatch, {"bytes_limit": 9216})
    engine = dataclasses.replace(setup.engine, memory_bytes=7000)
    given = dataclasses.replace(setup, engine=engine)
    assert given.with_reported_memory().engine.memory_bytes == 7000


def test_weights_of_a_setup_count_once_and_where_they_are_used():
    first, second = jax.devices()[:2]
    model = tiny_llama(0)
    params = jax.device_put(model.params, first)
    model = dataclasses.replace(model, params=params)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    both = Setup.of(model, drafter=model)
    assert bytes_on(first, both._weights_in_place) == size
    assert bytes_on(second, both._weights_in_place) == 0
    # Split weights are copies; the whole ones stay on the first device beside them.
    mesh = Mesh(np.array([first, second]), ("tensor",))
    split = Setup.of(model, mesh=mesh)
    assert bytes_on(first, split._weights_in_place) == 0


def test_token_ids_among_weights_are_not_their_dtype():
    model = tiny_llama(0)
    table = jnp.zeros(61, jnp.int32)
    narrow = jnp.zeros((4, 4), jnp.bfloat16)
    for params, expected in (
        ({"a_table": table, "weight": narrow}, narrow.dtype),
        ({"a_table": table}, None),
        ((), None),
    ):
        drafter = LoadedDrafter("mine", NgramDrafter(), params)
        assert Setup.of(model, drafter=drafter)._plan_request.drafter_dtype == expected


def test_an_engine_says_what_its_steps_took(monkeypatch):
    stats = {"bytes_in_use": 5000, "peak_bytes_in_use": 5000}
    plan = dataclasses.replace(memory_plan(NUM_PAGES), workspace_bytes=700)
    reporting(monkeypatch, stats)
    monkeypatch.setattr(Setup, "memory", plan)
    with specjax.Engine(tiny_llama(0), engine=ENGINE) as engine:
        assert engine.memory == plan
        engine.add([1, 2, 3], SamplingParams(max_tokens=4))
        stats["peak_bytes_in_use"] = 5800
        with pytest.warns(UserWarning, match="steps were seen to take"):
            engine.step()
        assert engine.memory.measured_workspace == 800


def test_steps_that_copy_the_pool_may_take_as_much():
    plan = dataclasses.replace(memory_plan(NUM_PAGES), copied_per_token=10.0)
    assert plan.planned_workspace(50) == 10**6 + 10 * 16 * 50


@pytest.mark.slow
@pytest.mark.parametrize(
    "verification, more",
    [("seeded", {}), ("block", {}), ("seeded", {"max_drafts_per_step": 4})],
)
def test_steps_are_planned_with_the_rules_that_they_verify_by(verification, more):
    """Rules by law hold more arrays of logits; few drafts need fewer."""
    model = tiny_llama(0, vocab_size=8192, num_layers=1)
    setup = Setup.of(
        model,
        drafter=model,
        verification=verification,
        num_speculative_tokens=3,
        speculative_config=more,
        engine=EngineConfig(memory_bytes=10**9, max_rows=4, row_buckets=(), max_context=64),
    )
    rules = [Rule.of(verification)]
    setup = setup.for_run(rules)
    real = setup.decoder(setup.standing_sizes(), rules)
    alike = AbstractDecoder(real.config)
    needed = compile_bucket(alike, burst_bucket(alike, 3)).workspace_bytes
    assert setup.memory is not None
    assert needed <= setup.memory.workspace_bytes <= 1.02 * needed


@pytest.mark.full
@pytest.mark.goodput
def test_what_other_kinds_of_sampling_learned_stays_in_the_file(monkeypatch, tmp_path):
    """A process that only samples ran after one that was greedy."""
    monkeypatch.setenv("SPECJAX_CACHE_DIR", str(tmp_path))
    model = tiny_llama(0)
    options = {"drafter": model, "num_speculative_tokens": 2}
    setup = Setup.of(model, **options, engine=EngineConfig(max_context=64))
    for kind in (GREEDY, SAMPLED):
        forget_speed()  # as in a process that begins
        own = dataclasses.replace(setup, acceptance_kind=kind)
        decoder = own.decoder(own.standing_sizes(), [0])
        policy = own.policy(decoder)
        assert isinstance(policy, Goodput)
        policy.costs.observe(Bucket(1, 0), 10, 1e-3)
        policy.ledger.budget_s = 0.25
        own.keep(types.SimpleNamespace(policy=policy, decoder=decoder))
    kept = cost_files.Known(StepCosts())
    assert cost_files.load(decoder, kept)
    assert {kind: own.budget_s for kind, own in kept.ledgers.items()} == {
        GREEDY: 0.25,
        SAMPLED: 0.25,
    }


@pytest.mark.full
@pytest.mark.goodput
def test_drafts_asked_for_in_vain_are_known_to_the_next_call():
    """An n-gram drafter that found no match: the next call must not try as if it knew nothing."""
    model = tiny_llama(0)
    setup = Setup.of(model, drafter="ngram", num_speculative_tokens=2)
    decoder = setup.decoder(setup.standing_sizes(), [0])
    policy = setup.policy(decoder)
    assert isinstance(policy, Goodput)
    policy.costs.observe(Bucket(1, 2), 10, 1e-3)
    ones, zeros = np.ones((32, 1), int), np.zeros((32, 1), int)
    policy.survival.observe(np.zeros(1), ones, zeros, zeros, zeros, np.full(1, 2))
    assert policy.survival.num_trials == 0
    setup.keep(types.SimpleNamespace(policy=policy, decoder=decoder))
    known = setup.policy(decoder).survival
    assert known.num_told >= 16
    assert known.presence()[0] < 0.2


def test_what_a_forward_does_is_counted_in_the_weights_at_hand():
    target = specjax.load_model("demo")
    config, count = (
        target.config,
        sum(leaf.size for leaf in jax.tree.leaves(target.params)),
    )
    known = plans.model_work(config, "float32", 1, count)
    assert known == plans.model_work(config, "float32", 1)


def test_a_drafter_that_may_not_draft_has_no_pages():
    setup = Setup.of("demo", drafter="demo", num_speculative_tokens=0)
    assert (setup.drafter.name, setup.drafter.configs) == ("none", ())
    assert Setup.of("demo", drafter="demo", num_speculative_tokens=1).drafter.name == "demo-draft"
