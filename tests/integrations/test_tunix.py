"""SpecjaxRollout beside tunix's own sampler, scores and trainer: the `tunix` extra."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import specjax
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.models import llama
from specjax.models.layers import dense_causal_attention

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # tunix uses what newer jax and flax deprecate
    pytest.importorskip("tunix")
    import qwix
    from tunix.generate import sampler as tunix_sampler
    from tunix.models.gemma import model as gemma
    from tunix.models.llama3 import model as llama3
    from tunix.models.qwen2 import model as qwen2
    from tunix.models.qwen3 import model as qwen3
    from tunix.rl import common, rl_cluster
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rollout import base_rollout, vanilla_rollout

    from specjax.integrations import tunix as integration
    from specjax.integrations import tunix_weights
    from specjax.integrations.tunix import SpecjaxRollout

pytestmark = [
    pytest.mark.tunix,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

PAD, EOS, BOS = 0, 1, 2
SIZES = {
    "num_layers": 2,
    "vocab_size": 64,
    "embed_dim": 64,
    "hidden_dim": 96,
    "num_heads": 4,
    "head_dim": 16,
    "num_kv_heads": 2,
    "rope_theta": 500_000,  # which only Qwen2's forward reads
    "norm_eps": 1e-6,
}
MODELS = {
    "qwen3": (qwen3, qwen3.Qwen3, {}),
    "qwen3 tied": (qwen3, qwen3.Qwen3, {"use_tied_embedding": True}),
    "qwen2": (qwen2, qwen2.Qwen2, {}),
    "qwen2 tied": (qwen2, qwen2.Qwen2, {"use_tied_embedding": True}),
    "llama3": (llama3, llama3.Llama3, {}),
    "llama3 tied": (llama3, llama3.Llama3, {"weight_tying": True}),
}
PROMPTS = ["HELLO", "AB", "Q", "AB AB AB AB"]
ENGINE = EngineConfig(page_size=8, max_rows=8, burst_steps=8)
TEMPERATURE = 0.7


class Tokenizer:
    """A token per character: the five methods that tunix asks of any tokenizer."""

    def encode(self, text, **kwargs):
        return [PAD if c == "_" else 3 + (ord(c) - 32) % 61 for c in text]

    def decode(self, ids, **kwargs):
        return "".join(chr(32 + i - 3) if i > 2 else f"<{i}>" for i in ids)

    def bos_id(self):
        return BOS

    def eos_id(self):
        return EOS

    def pad_id(self):
        return PAD


@pytest.fixture(autouse=True)
def ranks_promote():
    """tunix adds axes silently, in threads of its own too."""
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    jax.config.update("jax_numpy_rank_promotion", "raise")


def model(name="qwen3", seed=0, **sizes):
    """Returns a tunix model with random weights; its own constructor leaves MLPs at zero."""
    module, make, flags = MODELS[name]
    built = make(module.ModelConfig(**(SIZES | sizes), **flags), rngs=nnx.Rngs(0))
    randomise(built, seed)
    return built


def randomise(built, seed):
    rng = np.random.default_rng(seed)
    for path, variable in nnx.to_flat_state(nnx.state(built, nnx.Param)):
        noise = jnp.asarray(rng.standard_normal(variable.shape), variable.dtype)
        is_norm = len(variable.shape) == 1
        weight = 1 + 0.2 * noise if is_norm else 0.15 * noise
        # The logit of padding is 0, never the largest: tunix's own sampler would choose it.
        if path[0] == "embedder":
            weight = weight.at[PAD].set(0)
        if path[0] == "lm_head":
            weight = weight.at[:, PAD].set(0)
        variable.set_value(weight)


def mesh_of(devices, shape=(1, 1)):
    return jax.sharding.Mesh(np.array(devices).reshape(shape), ("fsdp", "tp"))


ONE = mesh_of(jax.devices()[:1])


def config(**fields):
    asked = {
        "max_tokens_to_generate": 24,
        "max_prompt_length": 16,
        "kv_cache_size": 64,
        "temperature": TEMPERATURE,
        "return_logprobs": True,
    }
    return base_rollout.RolloutConfig(**(asked | fields))


GREEDY = config(top_p=None)


def made(built, mesh=ONE, tokenizer=None, rollout_config=None, **options):
    options = {"engine": ENGINE} | options
    return SpecjaxRollout(
        rollout_actor=built,
        tokenizer=tokenizer or Tokenizer(),
        mesh=mesh,
        rollout_config=rollout_config or config(),
        **options,
    )


def vanilla(built, cache_size=64):
    return vanilla_rollout.VanillaRollout(
        built,
        Tokenizer(),
        base_rollout.CacheConfig(cache_size, SIZES["num_layers"], 2, 16),
    )


@functools.cache
def standard():
    """Returns a rollout that tests share which do not change its weights."""
    return made(model())


@functools.cache
def beside():
    """Returns tunix's own engine of the same model."""
    return vanilla(standard().model())


def assert_same(output, expected):
    """All that tunix reads of samples."""
    assert [t.tolist() for t in output.tokens] == [t.tolist() for t in expected.tokens]
    assert output.text == expected.text
    np.testing.assert_array_equal(
        output.left_padded_prompt_tokens, expected.left_padded_prompt_tokens
    )
    for one, other in zip(output.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def padded(output, width):
    """Returns prompts and completions as GRPOLearner hands them on."""
    completions = np.full((len(output.tokens), width), PAD, np.int32)
    for row, tokens in zip(completions, output.tokens):
        row[: len(tokens)] = tokens
    return jnp.asarray(output.left_padded_prompt_tokens), jnp.asarray(completions)


def largest_gap(logps, output):
    """Returns the largest difference of two reports of the same samples' log-probabilities."""
    gaps = [
        np.max(np.abs(np.asarray(own) - np.asarray(row)[: len(own)]), initial=0.0)
        for own, row in zip(output.logprobs, logps, strict=True)
    ]
    return max(gaps)


# Weights


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_tunix(name):
    built = model(name)
    ours = integration.as_model(built, max_position_embeddings=64)
    ids = jnp.asarray(np.random.default_rng(1).integers(3, 64, (2, 40)))
    positions = jnp.broadcast_to(jnp.arange(40), (2, 40))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((40, 40), bool)), (2, 40, 40))
    expected, _ = built(ids, positions, None, mask)

    def attend(layer, q, k, v, cache):
        return dense_causal_attention(q, k, v, scale=ours.config.scale), cache

    hidden, _ = llama.forward(ours.params, ours.config, ids, positions, attend, (None, None))
    logits = llama.logits(ours.params, ours.config, hidden)
    assert float(jnp.std(expected)) > 0.3
    np.testing.assert_allclose(logits, expected, atol=5e-5)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_samples_are_those_of_tunix(name):
    built = model(name)
    rollout = made(built)
    assert_same(rollout.generate(PROMPTS, GREEDY), vanilla(built).generate(PROMPTS, GREEDY))
    assert rollout.decoder.drafter == "history"
    assert rollout.metrics["num_drafted"] > 0


def test_weights_are_converted_when_they_are_new():
    built = model()
    rollout = made(built)
    first = rollout.generate(PROMPTS, GREEDY)
    rollout.generate(PROMPTS, GREEDY)
    assert rollout.num_conversions == 1
    before = rollout.decoder.num_traces
    optimiser = nnx.Optimizer(built, optax.sgd(0.5), wrt=nnx.Param)
    ids = jnp.asarray([[4, 5, 6, 7]])

    def loss(policy):
        mask = jnp.tril(jnp.ones((1, 4, 4), bool))
        return jnp.sum(policy(ids, jnp.arange(4)[None], None, mask)[0][..., 9])

    optimiser.update(built, nnx.grad(loss)(built))
    second = rollout.generate(PROMPTS, GREEDY)
    assert rollout.num_conversions == 2
    assert rollout.decoder.num_traces == before
    assert [t.tolist() for t in second.tokens] != [t.tolist() for t in first.tokens]
    assert_same(second, vanilla(built).generate(PROMPTS, GREEDY))


def test_it_holds_no_weights_of_the_trainer():
    built = model()
    rollout = made(built)
    rollout.generate(PROMPTS[:1], GREEDY)
    old = weakref.ref(built.layers[0].mlp.up_proj.kernel.get_value())
    assert old() is not None
    randomise(built, 5)
    gc.collect()
    assert old() is None
    assert rollout.model() is built


def test_weights_are_found_wherever_the_policy_has_them():
    """Their places are remembered, and looked for again where the policy has others."""
    built = model()
    rollout = made(built, drafter=None)
    expected = {seed: vanilla(model(seed=seed)).generate(PROMPTS, GREEDY) for seed in (0, 4)}
    assert_same(rollout.generate(PROMPTS, GREEDY), expected[0])
    other = model(seed=4)
    built.layers[1].attn = other.layers[1].attn  # other modules
    built.layers[0].mlp.up_proj.kernel = other.layers[0].mlp.up_proj.kernel  # another variable
    nnx.update(built, nnx.state(other, nnx.Param))
    assert_same(rollout.generate(PROMPTS, GREEDY), expected[4])
    built.layers[0].attn.q_proj.w_lora_a = nnx.LoRAParam(jnp.ones((64, 2)))
    with pytest.raises(ValueError, match="low-rank adapters"):
        rollout.generate(PROMPTS, GREEDY)
    del built.layers[0].attn.q_proj.w_lora_a
    assert_same(rollout.generate(PROMPTS, GREEDY), expected[4])
    del built.layers[0].attn.q_proj.w
    with pytest.raises(ValueError, match=r"missing \['layers.0.attn.q_proj.w'\]"):
        rollout.generate(PROMPTS, GREEDY)


def test_weights_of_another_dtype():
    built = model()
    rollout = made(built, rollout_config=config(data_type=jnp.bfloat16))
    output = rollout.generate(PROMPTS, config(top_p=None))
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(rollout._params()))
    assert len(output.tokens) == len(PROMPTS)


@contextlib.contextmanager
def no_transfers():
    """As tunix's sync_weights on a CPU."""
    with (
        jax.transfer_guard_device_to_host("disallow_explicit"),
        jax.transfer_guard_host_to_device("disallow_explicit"),
    ):
        yield


def test_a_snapshot_is_that_of_the_last_update():
    built, others = model(), model(seed=3)
    rollout = made(built, shares_weights=False)
    assert rollout.model() is None
    before = rollout.generate(PROMPTS, GREEDY)
    randomise(built, 3)  # the trainer goes on
    assert_same(rollout.generate(PROMPTS, GREEDY), before)
    prompts, completions = padded(before, 24)
    graphdef, state = nnx.split(standard().model())
    expected = common.compute_per_token_logps(
        graphdef, state, prompts, completions, PAD, EOS, temperature=TEMPERATURE
    )
    own = rollout.get_per_token_logps(prompts, completions)
    np.testing.assert_allclose(own, expected, atol=1e-6)
    with no_transfers():
        rollout.update_params(nnx.state(built, (nnx.Param,)), (nnx.Param,))
    after = rollout.generate(PROMPTS, GREEDY)
    assert rollout.num_conversions == 2
    assert_same(after, vanilla(others).generate(PROMPTS, GREEDY))
    of_numpy = jax.tree.map(np.asarray, nnx.state(standard().model(), nnx.Param))
    with no_transfers():
        rollout.update_params(of_numpy)
    assert_same(rollout.generate(PROMPTS, GREEDY), before)


def test_shared_weights_take_an_update_of_themselves_alone():
    built = model()
    rollout = made(built)
    with no_transfers():
        rollout.update_params(nnx.state(built))  # offload_to_cpu does so
    with pytest.raises(ValueError, match="shares_weights=False"):
        rollout.update_params(nnx.state(model(seed=3)))


def adapted(built, alpha=8.0):
    """Returns a model with low-rank adapters that are not zero."""
    provider = qwix.LoraProvider(
        module_path=".*q_proj|.*o_proj|.*gate_proj|.*down_proj", rank=4, alpha=alpha
    )
    with_adapters = qwix.apply_lora_to_model(
        built, provider, rngs=nnx.Rngs(0), **built.get_model_input()
    )
    rng = np.random.default_rng(11)
    for _, variable in nnx.to_flat_state(nnx.state(with_adapters, nnx.LoRAParam)):
        variable.set_value(0.15 * jnp.asarray(rng.standard_normal(variable.shape), jnp.float32))
    return with_adapters


def test_adapters_are_merged():
    built = adapted(model())
    rollout = made(built, lora_alpha=8.0, shares_weights=False)
    expected = vanilla(built).generate(PROMPTS, GREEDY)
    output = rollout.generate(PROMPTS, GREEDY)
    assert_same(output, expected)
    assert output.text != standard().generate(PROMPTS, GREEDY).text
    # tunix synchronises the adapters alone.
    halved = jax.tree.map(lambda x: x / 2, nnx.state(built, (nnx.LoRAParam,)))
    with no_transfers():
        rollout.update_params(halved, (nnx.LoRAParam,))
    output = rollout.generate(PROMPTS, GREEDY)
    nnx.update(built, halved)
    assert_same(output, vanilla(built).generate(PROMPTS, GREEDY))


def test_the_scale_of_adapters_is_that_of_the_policy():
    built = adapted(model(), alpha=12.0)
    assert tunix_weights.alpha_of(built) == 12.0
    expected = vanilla(built).generate(PROMPTS, GREEDY)
    assert_same(made(built).generate(PROMPTS, GREEDY), expected)
    # As RLCluster does with a policy whose mesh is another.
    again = nnx.merge(*nnx.split(built))
    assert_same(made(again).generate(PROMPTS, GREEDY), expected)
    assert tunix_weights.alpha_of(model()) is None
    rules = [
        qwix.LoraRule(module_path=f".*{name}_proj", rank=2, alpha=alpha)
        for name, alpha in (("q", 1.0), ("o", 2.0))
    ]
    two = qwix.apply_lora_to_model(
        model(), qwix.LoraProvider(rules), rngs=nnx.Rngs(0), **model().get_model_input()
    )
    assert tunix_weights.alpha_of(two) is None
    with pytest.raises(ValueError, match="pass lora_alpha"):
        made(two)


# Samples


def test_log_probabilities_are_those_of_tunix(say):
    rollout = standard()
    built = rollout.model()
    output = rollout.generate([*PROMPTS, *PROMPTS], config())
    prompts, completions = padded(output, 24)
    graphdef, state = nnx.split(built)
    expected = common.compute_per_token_logps(
        graphdef,
        state,
        prompt_tokens=prompts,
        completion_tokens=completions,
        pad_id=PAD,
        eos_id=EOS,
        temperature=TEMPERATURE,
    )
    gap = largest_gap(expected, output)
    say(f"largest difference of log-probabilities {gap:.2g}")
    assert gap < 1e-4  # what is asked for is 1e-3
    own = rollout.get_per_token_logps(prompts, completions, completion_mask=None)
    np.testing.assert_array_equal(own, expected)
    without_temperature = beside().get_per_token_logps(prompts, completions)
    assert largest_gap(without_temperature, output) > 0.1
    bare = rollout.generate(PROMPTS, config(return_logprobs=False))
    assert bare.logprobs is None


def test_truncated_samples_keep_tunix_convention():
    """Over the temperature alone, whatever top-k and top-p cut off."""
    output = standard().generate(PROMPTS * 2, config(top_k=3, top_p=0.8))
    prompts, completions = padded(output, 24)
    expected = standard().get_per_token_logps(prompts, completions)
    assert largest_gap(expected, output) < 1e-4


def test_repeated_prompts_have_samples_of_their_own():
    group = standard().generate(["HELLO"] * 4, config())
    assert len(set(group.text)) == 4
    again = standard().generate(["HELLO"] * 4, config())
    assert not set(group.text) & set(again.text)  # noise of its own for each call


def test_a_run_that_is_repeated_is_the_same():
    built = model()
    runs = [
        [made_rollout.generate(PROMPTS, asked).text for _ in range(2)]
        for made_rollout, asked in (
            (made(built), config()),
            (made(built, drafter=None), config()),
            (made(built), config(seed=5)),
            (made(built), config(seed=jax.random.key(5))),
            (made(built), config(seed=jax.random.PRNGKey(5))),
        )
    ]
    assert runs[0] == runs[1]  # drafts change nothing
    assert runs[3] == runs[4]
    assert len({tuple(run[0]) for run in (runs[0], runs[2], runs[3])}) == 3


def test_a_group_shares_the_pages_of_its_prompt():
    before = standard().decoder._loop.num_prefilled if standard().metrics else 0
    standard().generate(["ZYXWVUTSRQPONMLKJIHGFEDC"] * 4, config())
    fed = standard().decoder._loop.num_prefilled - before
    assert 24 <= fed < 2 * 24  # of four times as many


def test_prompts_longer_than_max_prompt_length():
    prompts = ["A", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
    output = standard().generate(prompts, GREEDY)
    assert output.left_padded_prompt_tokens.shape == (2, 32)
    assert_same(output, beside().generate(prompts, GREEDY))


def test_pad_inside_a_prompt_is_not_seen():
    prompts = ["_HE__LLO", "AB"]
    output = standard().generate(prompts, GREEDY)
    assert_same(output, beside().generate(prompts, GREEDY))


def test_end_of_sequence():
    """Stripped as by tunix's own engine; a completion may be empty."""
    plain = standard().generate(PROMPTS, GREEDY)
    first, later = int(plain.tokens[0][0]), int(plain.tokens[1][3])
    asked = config(top_p=None, eos_tokens=[first, later])
    output = standard().generate(PROMPTS, asked)
    assert_same(output, beside().generate(PROMPTS, asked))
    assert output.tokens[0].shape == (0,)
    assert output.tokens[0].dtype == np.int32
    assert output.text[0] == ""
    assert len(output.tokens[1]) <= 3
    kept = made(model(), keeps_eos=True).generate(PROMPTS, asked)
    assert kept.tokens[0].tolist() == [first]
    assert kept.text == output.text
    assert [len(row) for row in kept.logprobs] == [len(row) for row in kept.tokens]


def test_padding_is_not_sampled():
    """The trainer takes every such token for padding."""
    built = model()
    head = built.lm_head.w.get_value()
    built.lm_head.w.set_value(head.at[:, PAD].set(3 * head[:, 9]))
    asked = config(temperature=1.0)
    expected = vanilla(built).generate(PROMPTS * 4, asked)
    assert any(PAD in tokens for tokens in expected.tokens)
    output = made(built).generate(PROMPTS * 4, asked)
    assert not any(PAD in tokens for tokens in output.tokens)


def test_pad_that_is_eos_ends_a_text():
    tokenizer = Tokenizer()
    tokenizer.pad_id = lambda: EOS
    built = model()
    head = built.lm_head.w.get_value()
    built.lm_head.w.set_value(head.at[:, EOS].set(2 * head[:, EOS]))
    output = made(built, tokenizer=tokenizer).generate(PROMPTS * 4, config())
    assert min(map(len, output.tokens)) < 24
    assert not any(EOS in tokens for tokens in output.tokens)


def test_calls_of_many_threads():
    inside, texts = [], {}

    class Slow(Tokenizer):
        def encode(self, text, **kwargs):
            inside.append(text)
            time.sleep(0.02)
            assert inside == [text]  # nobody else came in
            inside.remove(text)
            return super().encode(text)

    rollout = made(standard().model(), tokenizer=Slow())

    def call(prompt):
        texts[prompt] = rollout.generate([prompt], GREEDY).text

    threads = [threading.Thread(target=call, args=(prompt,)) for prompt in PROMPTS]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    together = standard().generate(PROMPTS, GREEDY).text
    assert [texts[prompt] for prompt in PROMPTS] == [[text] for text in together]


def test_calls_of_threads_share_steps():
    """As agentic learners make them: one prompt each, at the same time."""
    rollout, alone = made(standard().model()), made(standard().model())
    results, barrier = [], threading.Barrier(8)

    def call():
        barrier.wait()
        results.append(rollout.generate(["AB AB"], config()))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    # Each call has the noise of its number, in the order in which they came.
    expected = [alone.generate(["AB AB"], config()) for _ in range(8)]
    assert len({each.text[0] for each in expected}) > 4
    assert sorted(each.text[0] for each in results) == sorted(each.text[0] for each in expected)
    assert max(record.num_rows for record in rollout.decoder.decisions) > 2
    assert max(record.num_rows for record in alone.decoder.decisions) == 1


def test_samples_do_not_depend_on_the_order_of_calls():
    """Of a prompt, of how often it was sampled from these weights, and of the weights."""
    texts = [*PROMPTS, *PROMPTS, "HELLO"]
    sampled = []
    for order in (1, -1):
        rollout = made(model())
        told = {}
        for text in texts[::order]:
            told.setdefault(text, []).append(rollout.generate(text, config()).text[0])
        assert len({*told["HELLO"]}) == 3
        randomise(rollout.model(), 0)  # the same weights, as new arrays: a step that changed none
        told["of the next step"] = rollout.generate("HELLO", config()).text
        assert told["of the next step"][0] not in told["HELLO"]
        randomise(rollout.model(), 3)
        told["of other weights"] = rollout.generate("HELLO", config()).text
        sampled.append(told)
    assert sampled[0] == sampled[1]
    at_once = made(model()).generate(texts, config()).text
    for text, tokens in zip(texts, at_once, strict=True):
        assert tokens in sampled[0][text]


def test_one_text_is_one_prompt():
    """Agentic learners pass a dialogue as it is, in no list."""
    output = standard().generate("HELLO", GREEDY)
    assert_same(output, standard().generate(["HELLO"], GREEDY))
    assert_same(output, beside().generate("HELLO", GREEDY))


def test_the_sampler_that_scripts_evaluate_with():
    rollout = made(standard().model())
    expected = beside()._sampler(PROMPTS, 24, max_prompt_length=16, return_logprobs=True)
    output = rollout._sampler(PROMPTS, 24, max_prompt_length=16, return_logprobs=True)
    assert [row.tolist() for row in output.tokens] == [row.tolist() for row in expected.tokens]
    assert output.text == expected.text
    np.testing.assert_array_equal(output.padded_prompt_tokens, expected.padded_prompt_tokens)
    nearly = rollout._sampler(
        input_strings=PROMPTS[0],
        max_generation_steps=24,
        temperature=1e-4,
        top_k=1,
        top_p=1.0,
        echo=False,
        seed=None,
    )
    assert nearly.text == output.text[:1]
    assert nearly.logprobs is None
    sampled = [rollout._sampler("HELLO", 24, temperature=0.7, top_p=1.0).text for _ in range(2)]
    assert sampled[0] != sampled[1]
    stopped = rollout._sampler("HELLO", 24, eos_tokens=[int(output.tokens[0][2])])
    assert len(stopped.tokens[0]) <= 2
    assert rollout._sampler.transformer is rollout.model()
    own, theirs = rollout._sampler.tokenize("AB"), beside()._sampler.tokenize("AB")
    assert own == list(theirs)
    for name in ("beam_size", "echo", "pad_output", "multi_sampling", "images"):
        with pytest.raises(NotImplementedError, match=name):
            rollout._sampler("HELLO", 4, **{name: 2})


def test_a_draft_model_of_tunix():
    built = standard().model()
    small = integration.as_model(model(seed=0), max_position_embeddings=64)
    rollout = made(built, drafter=small, num_speculative_tokens=3)
    expected = made(built, drafter=None).generate(PROMPTS, config()).text
    assert rollout.generate(PROMPTS, config()).text == expected
    assert rollout.metrics["acceptance_rate"] > 0.8  # it is the policy itself
    rollout.draft_params = integration.as_model(model(seed=1), max_position_embeddings=64).params
    rollout.generate(PROMPTS, config())
    assert rollout.metrics["acceptance_rate"] < 0.5


@pytest.mark.parametrize("shape", [(1, 1), (2, 2)])
def test_another_mesh(shape):
    """The policy is trained on device 0 and sampled on others."""
    built = model()
    number = shape[0] * shape[1]
    devices = jax.devices()[1:2] if number == 1 else jax.devices()[:number]
    rollout = made(built, mesh=mesh_of(devices, shape))
    assert rollout.model() is None
    expected = standard().generate(PROMPTS, GREEDY)
    assert_same(rollout.generate(PROMPTS, GREEDY), expected)
    others = nnx.state(model(seed=3), (nnx.Param,))
    with no_transfers():
        rollout.update_params(others, (nnx.Param,))
    assert rollout.generate(PROMPTS, GREEDY).text != expected.text


# Bad input


def test_families_that_are_not_covered():
    with pytest.raises(NotImplementedError, match=r"gemma.*qwen3.*qwen2.*llama3"):
        tunix_weights.config_of(gemma.ModelConfig.gemma_2b(), max_position_embeddings=64)
    with pytest.raises(NotImplementedError, match="experts"):
        tunix_weights.config_of(qwen3.ModelConfig.qwen3_30b_a3b(), max_position_embeddings=64)
    with pytest.raises(NotImplementedError, match="qwen3"):
        made(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    ("prompts", "fields", "message"),
    [
        ([], {}, "no prompts"),
        (["A", "_" * 3], {}, "prompt 1 has no tokens"),
        (["A" * 50], {}, r"51 tokens and 24 to generate exceed the 64"),
        (["A"], {"max_tokens_to_generate": 100}, "kv_cache_size"),
        (["A"], {"temperature": -1.0}, "temperature=-1.0"),
        (["A"], {"eos_tokens": [99]}, "99"),
    ],
)
def test_bad_calls(prompts, fields, message):
    tokenizer = Tokenizer()
    if "_" in "".join(prompts):
        tokenizer.bos_id = lambda: None
    rollout = made(model(), tokenizer=tokenizer)
    with pytest.raises(ValueError, match=message):
        rollout.generate(prompts, config(**fields))


def test_bad_weights():
    built = model()
    rollout = made(built, shares_weights=False)
    with pytest.raises(ValueError, match="no weights"):
        rollout.update_params(nnx.State({}))
    with pytest.raises(ValueError, match=r"other\.w"):
        rollout.update_params(nnx.State({"other": {"w": nnx.Param(jnp.ones(3))}}))
    with pytest.raises(ValueError, match="missing"):
        tunix_weights.convert(
            {},
            tunix_weights.config_of(built.config, max_position_embeddings=8),
            jnp.float32,
        )
    good = rollout.generate(PROMPTS, GREEDY)
    state = nnx.state(model(), nnx.Param)
    rollout.update_params(jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state))
    with pytest.raises(ValueError, match="NaN"):
        rollout.generate(PROMPTS, GREEDY)
    rollout.update_params(nnx.state(model(), nnx.Param))
    assert_same(rollout.generate(PROMPTS, GREEDY), good)
    with pytest.raises(NotImplementedError, match="images"):
        rollout.generate(PROMPTS, GREEDY, images=[1])


# Training


def trained(rollout_engine, steps=20, rollout_mesh=ONE, num_iterations=1, **fields):
    """Trains a tiny policy to write the letter A; returns the cluster and rewards by step."""
    actor = model()
    rewards = []

    def share_of_a(prompts, completions, **kwargs):
        found = [text.count("A") / 8 for text in completions]
        rewards.append(float(np.mean(found)))
        return found

    role = rl_cluster.Role
    cluster = rl_cluster.RLCluster(
        actor=actor,
        reference=None,
        tokenizer=Tokenizer(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={
                role.ACTOR: ONE,
                role.REFERENCE: ONE,
                role.ROLLOUT: rollout_mesh,
            },
            rollout_engine=rollout_engine,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adamw(1e-2),
                eval_every_n_steps=1000,
                max_steps=steps,
            ),
            rollout_config=config(
                max_tokens_to_generate=8, max_prompt_length=8, temperature=1.0, **fields
            ),
        ),
    )
    learner = GRPOLearner(
        cluster,
        GRPOConfig(num_generations=4, num_iterations=num_iterations, beta=0.0),
        share_of_a,
    )
    traces = []
    generate = cluster.rollout.generate

    def counted(*arguments, **options):
        output = generate(*arguments, **options)
        if isinstance(cluster.rollout, SpecjaxRollout):
            traces.append(cluster.rollout.decoder.num_traces)
        return output

    cluster.rollout.generate = counted
    batch = {"prompts": np.array(["AB", "HELLO", "X", "QRS"])}
    learner.train([batch] * steps)
    return cluster, learner, rewards, traces


def test_grpo_trains_through_it(say):
    engine = functools.partial(SpecjaxRollout, drafter="history", engine=ENGINE)
    cluster, learner, rewards, traces = trained(engine)
    assert len(rewards) == 20
    first, last = np.mean(rewards[:4]), np.mean(rewards[-4:])
    say(f"mean reward of the first four steps {first:.3f}, of the last {last:.3f}")
    assert last > 2 * first + 0.1
    assert not learner.should_sync_weights
    assert cluster.rollout.num_conversions == 20
    # New weights compile nothing. What compiles later is for fewer rows or another K.
    say(f"traces after each step: {traces}")
    assert traces[-1] == traces[9]


def test_grpo_with_weights_that_are_synchronised():
    """A mesh of its own for rollouts, old log-probabilities, and drafts or none: one curve."""
    curves = []
    for drafter in ("history", None):
        engine = functools.partial(SpecjaxRollout, drafter=drafter, engine=ENGINE)
        cluster, learner, rewards, _ = trained(
            engine,
            steps=4,
            rollout_mesh=mesh_of(jax.devices()[1:2]),
            num_iterations=2,
        )
        assert learner.should_sync_weights
        assert cluster.rollout.num_conversions > 1
        curves.append(rewards)
    assert curves[0] == curves[1]


def test_specjax_generates_from_a_converted_model():
    built = model("llama3")
    ours = integration.as_model(built, max_position_embeddings=64)
    sampler = tunix_sampler.Sampler(built, Tokenizer(), tunix_sampler.CacheConfig(64, 2, 2, 16))
    ids = [sampler.tokenize(prompt).tolist() for prompt in PROMPTS]
    out = specjax.generate(
        ours,
        ids,
        sampling=SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[EOS]),
    )
    expected = sampler(PROMPTS, 24, 16).tokens
    for completion, tokens in zip(out, expected, strict=True):
        own = [token for token in completion.token_ids if token != EOS]
        assert own == tokens.tolist()
