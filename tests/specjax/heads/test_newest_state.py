"""Medusa heads and MLP speculators: equations in numpy, in the engine, and from folders."""

import dataclasses
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from head_equations import TARGET, VOCAB, silu, wide
from head_folders import put, random_tensors, without, write

import specjax
from specjax.drafters.base import DrafterContext
from specjax.drafters.token_by_token import Fed
from specjax.heads.equations import medusa, mlp_speculator
from specjax.heads.equations.medusa import OF_VLLM, PUBLISHED, MedusaConfig
from specjax.heads.equations.mlp_speculator import MlpSpeculatorConfig
from specjax.heads.namings.newest_state_files import read_medusa, read_mlp_speculator
from specjax.heads.specs import NewestStateDrafter
from specjax.paged.forward import make_batch
from specjax.testing import check_drafter
from specjax.trees import static_shapes
from specjax.trees.expanding import Growth
from specjax.types import DecoderParams

WIDTH, INNER = TARGET.config.hidden_size, 24
SIZES = {
    "target_hidden_size": WIDTH,
    "target_vocab_size": VOCAB,
    "aux_layers": (TARGET.config.num_layers,),
    "most_drafts": 3,
}
HEADS = {
    "Medusa": MedusaConfig(**SIZES),
    "Medusa of two blocks": MedusaConfig(**SIZES, num_blocks=2, has_bias=False),
    "Medusa with the target's head": MedusaConfig(**SIZES, has_head=False),
    "MLP": MlpSpeculatorConfig(**SIZES, inner_size=INNER),
    "MLP, tied": MlpSpeculatorConfig(**SIZES, inner_size=INNER, is_tied=True, scale_input=True),
    "MLP of one": MlpSpeculatorConfig(**SIZES | {"most_drafts": 1}, inner_size=INNER),
}
TREE = static_shapes.from_rank_paths([[0], [1], [0, 0], [0, 1], [0, 0, 0]])
GROWN = Growth(3, 2, 5).cut(3)


def module_of(config):
    return medusa if isinstance(config, MedusaConfig) else mlp_speculator


def make_head(name, seed=1, shape=None):
    config = HEADS[name]
    params = module_of(config).init(jax.random.key(seed), config, std=0.4)
    return specjax.LoadedDrafter("head", NewestStateDrafter(config, shape), params)


# The equations of the papers and of published code, in float64.


def medusa_logits(config, params, g, before):
    """f64[drafts, vocab]; `before` are the tokens before each draft token."""
    target = wide(TARGET.params)
    rows = []
    for head, _ in zip(params["heads"], before):
        x = g
        for block in head["blocks"]:
            x = x + silu(block["block"] @ x + block.get("block_bias", 0.0))
        rows.append(head.get("lm_head", target.get("lm_head", target["embed_tokens"])) @ x)
    return np.stack(rows)


def normed(x):
    return x / np.sqrt(np.mean(x * x) + 1e-6)


def mlp_logits(config, params, g, before):
    n, erf = config.most_drafts, np.vectorize(math.erf)
    of_state = 0.5 ** (0.5 / n)
    of_token = np.sqrt((1 - of_state**2) * config.inner_size / 2)
    at = lambda name, i: params[name][min(i, len(params[name]) - 1)]
    s = normed(g) / np.sqrt(2) if config.scale_input else g
    rows = []
    for i, token in enumerate(before):
        s = at("proj", i) @ s + of_token / of_state * at("emb", i)[token]
        s = normed(s) * at("scale", i) + at("shift", i)
        s = s * 0.5 * (1 + erf(s / np.sqrt(2)))
        rows.append(at("head", i) @ s)
    return np.stack(rows)


def equations_of(config):
    return medusa_logits if isinstance(config, MedusaConfig) else mlp_logits


class Rows:
    """Two rows of a head's state."""

    def __init__(self, config, params):
        self.params = DecoderParams(TARGET.params, params)
        context = DrafterContext(
            target=TARGET.config,
            num_speculative_tokens=config.most_drafts,
            dtype=jnp.dtype(jnp.float32),
            taps=config.aux_layers,
        )
        self.drafter = NewestStateDrafter(config).build(context)
        closure = self.drafter.draft.__closure__  # functions of a step are closed over one head
        cells = [cell.cell_contents for cell in closure]
        (self.head,) = [each for each in cells if hasattr(each, "feed_nodes")]
        self.state = self.drafter.init(2, 32, 16, 4)

    def absorb(self, tapped, counts):
        """Absorbs so many tokens of each row; tapped [n, width], of all of them in order."""
        fed = make_batch(
            jnp.zeros((2, 32), jnp.int32),
            jnp.arange(16, dtype=jnp.int32).reshape(2, 8),
            jnp.zeros(2, jnp.int32),
            jnp.array(counts, jnp.int32),
            num_tokens=8,
            page_size=4,
            num_slots=64,
        )
        padded = jnp.zeros((8, WIDTH)).at[: len(tapped)].set(tapped.astype(np.float32))
        self.state = self.drafter.absorb(
            self.params,
            self.state,
            fed,
            jnp.zeros(8, jnp.int32),
            (padded,),
            jnp.arange(2, dtype=jnp.int32),
            8,
        )

    def logits(self, row, tokens, depth_of=int):
        """Returns the logits after each of these tokens, the root and drafts, [n, vocab]."""
        history = jnp.zeros((2, 32), jnp.int32)
        history = history.at[row, 10 : 10 + len(tokens)].set(jnp.array(tokens))
        cache = SimpleNamespace(lengths=jnp.full(2, 10, jnp.int32))
        decode_state = SimpleNamespace(cache=cache, rows=2, history=history)
        is_fed = jnp.arange(2) == row
        hidden, _ = self.head.begin(self.params, self.state, decode_state, is_fed)
        found = [self.head.logits(self.params, hidden, depth_of(0))[row]]
        for depth in range(1, len(tokens)):
            at = jnp.full(2, 10 + depth, jnp.int32)
            fed = Fed(decode_state, history, at, is_fed, hidden, depth_of(depth))
            hidden, _ = self.head.feed(self.params, self.state, fed)
            found.append(self.head.logits(self.params, hidden, depth_of(depth))[row])
        return np.stack(found)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("is_traced", quick([False, True], True))
def test_what_it_says_is_what_its_equations_say(name, is_traced):
    """After prompts of two rows, and after more tokens of one of them."""
    loaded = make_head(name)
    config, rows = loaded.spec.config, Rows(loaded.spec.config, loaded.params)
    tapped = np.random.default_rng(2).standard_normal((9, WIDTH))
    rows.absorb(tapped[:5], (2, 3))
    rows.absorb(tapped[5:], (0, 4))
    equations = equations_of(config)
    for row, newest in ((0, tapped[1]), (1, tapped[8])):
        tokens = [7 + row, 20, 3, 50][: config.most_drafts]
        expected = equations(config, wide(loaded.params), newest, tokens)
        found = rows.logits(row, tokens, jnp.int32 if is_traced else int)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:num_speculative_tokens")  # more than some draft
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "name",
    quick(
        ["Medusa", "MLP", "MLP, tied", "MLP of one"],
        "Medusa",
        slow=["MLP", "MLP, tied", "MLP of one"],
    ),
)
def test_tokens_are_those_of_plain_decoding(temperature, name):
    """Even with a K that is larger than what the head drafts."""
    sampling = specjax.SamplingParams(temperature=temperature, max_tokens=20, seed=3)
    prompts = [[1, 2, 3], [5], [7, 8] * 9]
    config = {"policy": "fixed", "num_speculative_tokens": 5}
    plain = specjax.generate(TARGET, prompts, sampling=sampling)
    found = specjax.generate(
        TARGET, prompts, drafter=make_head(name), speculative_config=config, sampling=sampling
    )
    assert [out.token_ids for out in found] == [out.token_ids for out in plain]
    assert found.stats.acceptance.num_drafted > 20
    assert len(found.stats.acceptance.drafted_at) == HEADS[name].most_drafts


@pytest.mark.full
@pytest.mark.parametrize(
    "name", quick(["Medusa", "MLP", "MLP, tied"], "MLP", slow=["Medusa", "MLP, tied"])
)
@pytest.mark.parametrize(
    "tree",
    [
        {"speculative_token_tree": [[0], [1], [0, 0], [0, 1], [0, 0, 0]]},
        pytest.param({"tree_top_k": 2, "num_speculative_tokens": 3}, marks=pytest.mark.full),
    ],
    ids=["tree", "grown"],
)
def test_trees(name, tree):
    sampling = specjax.SamplingParams(temperature=0.8, max_tokens=16, seed=3)
    prompts = [[1, 2, 3], [7, 8] * 5]
    plain = specjax.generate(TARGET, prompts, sampling=sampling)
    found = specjax.generate(
        TARGET,
        prompts,
        drafter=make_head(name),
        speculative_config={"policy": "fixed"} | tree,
        sampling=sampling,
    )
    assert [out.token_ids for out in found] == [out.token_ids for out in plain]


def test_a_tree_is_no_deeper_than_the_head_drafts():
    with pytest.raises(ValueError, match="depth 4 is deeper than the 3 tokens"):
        specjax.generate(
            TARGET,
            [1, 2],
            drafter=make_head("MLP"),
            speculative_config={"tree_top_k": 2, "num_speculative_tokens": 4},
        )


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param("Medusa", None, marks=pytest.mark.full),
        pytest.param("MLP", TREE, marks=pytest.mark.slow),
        *(
            pytest.param(*at, marks=pytest.mark.slow)
            for at in [
                ("Medusa", TREE),
                ("Medusa", GROWN),
                ("MLP", None),
                ("MLP", GROWN),
            ]
        ),
    ],
)
def test_it_keeps_the_contract_of_drafters(name, shape):
    check_drafter(make_head(name, shape=shape), TARGET)


def counting():
    """Returns a target that says the token after its newest one."""
    zero = lambda leaf: jnp.zeros_like(leaf)
    layers = tuple(
        layer | {"o_proj": zero(layer["o_proj"]), "down_proj": zero(layer["down_proj"])}
        for layer in TARGET.params["layers"]
    )
    table = TARGET.params["embed_tokens"]
    table = table / jnp.linalg.norm(table, axis=1, keepdims=True)
    params = TARGET.params | {"layers": layers, "embed_tokens": table}
    params["lm_head"] = jnp.roll(table, 1, axis=0)  # row t + 1 is the embedding of token t
    params["norm"] = jnp.ones_like(params["norm"])
    return specjax.Model(TARGET.config, params, name="counting")


def knowing(target, kind):
    """Returns heads that count as the target does, from its hidden state or its newest token."""
    table = target.params["embed_tokens"]
    if kind == "Medusa":
        config = HEADS["Medusa"]
        params = medusa.init(jax.random.key(0), config, std=0.0)
        # The state is of the token before the root, so that head i counts i + 2 on.
        heads = tuple(
            head | {"lm_head": jnp.roll(table, 2 + index, axis=0)}
            for index, head in enumerate(params["heads"])
        )
        params = {"heads": heads}
    else:
        config = MlpSpeculatorConfig(**SIZES, inner_size=2 * WIDTH)
        params = mlp_speculator.init(jax.random.key(0), config, std=0.0)
        # gelu(x) - gelu(-x) = x: the embedding and its negative give it back.
        signed = jnp.concatenate([table, -table], axis=1)
        following = jnp.roll(table, 1, axis=0)
        params["emb"] = (signed,) * 3
        params["head"] = (jnp.concatenate([following, -following], axis=1),) * 3
    return specjax.LoadedDrafter("knows", NewestStateDrafter(config), params)


@pytest.mark.parametrize("kind", ["Medusa", "MLP"])
@pytest.mark.parametrize("count", quick([1, 3], 3, slow=[1]))
@pytest.mark.full
def test_a_head_that_knows_its_target_is_always_accepted(kind, count):
    target = counting()
    out = specjax.generate(
        target,
        [[3, 4, 5], [50]],
        drafter=knowing(target, kind),
        speculative_config={"policy": "fixed", "num_speculative_tokens": count},
        sampling=specjax.SamplingParams(temperature=0, max_tokens=2 * (count + 1)),
    )
    expected = [[(at + 1 + i) % VOCAB for i in range(2 * (count + 1))] for at in (5, 50)]
    assert [one.token_ids for one in out] == expected
    acceptance = out.stats.acceptance
    assert acceptance.num_accepted == acceptance.num_drafted > 0


# Folders.


def mlp_raw(**more):
    raw = {"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"]}
    sizes = {"emb_dim": WIDTH, "inner_dim": INNER, "n_predict": 3, "vocab_size": VOCAB}
    return raw | sizes | {"top_k_tokens_per_head": [5, 4, 3], "n_candidates": 5} | more


@pytest.mark.parametrize("prefix", ["", "speculator."])
@pytest.mark.parametrize("name", ["MLP", "MLP, tied"])
def test_folders_of_mlp_speculators(tmp_path, name, prefix):
    config = HEADS[name]
    tensors = random_tensors(mlp_speculator.weights_of(config, prefix))
    flags = {"tie_weights": config.is_tied, "scale_input": config.scale_input}
    folder = write(tmp_path, mlp_raw(**flags), tensors)
    found = read_mlp_speculator(folder, TARGET.config, jnp.float32)
    assert found.config == config
    for index, leaf in enumerate(found.params["proj"]):
        np.testing.assert_array_equal(leaf, tensors[f"{prefix}proj.{index}.weight"])
    for key, file_name in (("scale", "weight"), ("shift", "bias")):
        for index, leaf in enumerate(found.params[key]):
            np.testing.assert_array_equal(leaf, tensors[f"{prefix}ln.{index}.{file_name}"])
    assert specjax.load_drafter(folder, TARGET).spec == NewestStateDrafter(config)


def test_copies_of_tied_weights(tmp_path):
    """What torch.save writes holds a tied weight under each of its names."""
    config = HEADS["MLP, tied"]
    tensors = random_tensors(mlp_speculator.weights_of(config, "speculator."))
    copies = {
        f"speculator.{part}.{number}.{of_part}": tensors[f"speculator.{part}.{first}.{of_part}"]
        for first, of in enumerate(
            (("emb.weight", "head.weight", "ln.weight", "ln.bias"), ("proj.weight",))
        )
        for part, of_part in (each.split(".") for each in of)
        for number in range(first + 1, 3)
    }
    assert len(copies) == 9
    raw = mlp_raw(tie_weights=True, scale_input=True)
    read = lambda tensors, dtype=jnp.float32: read_mlp_speculator(
        write(tmp_path, raw, tensors), TARGET.config, dtype
    )
    found, plain = read(tensors | copies), read(tensors)
    assert found.config == config
    jax.tree.map(np.testing.assert_array_equal, found.params, plain.params)
    assert read(tensors | copies, None).config == config
    for name, tensor in copies.items():
        with pytest.raises(ValueError, match=f"no use for: {name}"):
            read(tensors | copies | {name: tensor + 1})
        with pytest.raises(ValueError, match=f"no use for: {name}"):
            read(tensors | copies | {name: tensor[:-1]}, None)


PREFIXED = tuple(f"medusa_heads.{name}" for name in OF_VLLM)


@pytest.mark.parametrize("naming", [PUBLISHED, OF_VLLM, PREFIXED])
@pytest.mark.parametrize("name", [name for name in HEADS if "Medusa" in name])
def test_folders_of_medusa(tmp_path, name, naming):
    """The number of heads in config.json is wrong in published folders: the tensors decide."""
    config = HEADS[name]
    tensors = random_tensors(medusa.weights_of(config, naming))
    folder = write(tmp_path, {"medusa_num_heads": 2, "medusa_num_layers": 1}, tensors)
    if naming == PUBLISHED:
        (folder / "model.safetensors").rename(folder / "medusa_lm_head.safetensors")
    found = read_medusa(folder, TARGET.config, jnp.float32)
    assert found.config == config
    block = found.params["heads"][2]["blocks"][-1]["block"]
    of_block = naming[0].format(head=2, block=config.num_blocks - 1)
    np.testing.assert_array_equal(block, tensors[f"{of_block}.weight"])
    assert found.notes[-1] == "drafts at most 3 tokens, one for each head"
    assert specjax.load_drafter(folder, TARGET).spec == NewestStateDrafter(config)


@pytest.mark.parametrize("name", ["own", "one", "rows of all"])
def test_medusa_of_vllm_over_a_part_of_the_tokens(tmp_path, name):
    """`token_map` has the target's numbers of tokens; a matrix may have a row for all of them."""
    tokens = np.array([7, 2, 60, 33, 5])
    raw = {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": 3}
    raw |= {"num_hidden_layers": 1, "hidden_size": WIDTH, "vocab_size": VOCAB}
    raw |= {"truncated_vocab_size": 5, "medusa_fc_bias": True, "original_lm_head": name == "one"}
    config = MedusaConfig(**SIZES, own_vocab_size=5, shares_head=name == "one")
    whole = dataclasses.replace(config, own_vocab_size=None)
    written = whole if name == "rows of all" else config
    tensors = random_tensors(medusa.weights_of(written, OF_VLLM)) | {"token_map": tokens}
    folder = write(tmp_path, raw, tensors)
    found = read_medusa(folder, TARGET.config, jnp.float32)
    assert found.config == config
    np.testing.assert_array_equal(found.params["target_ids"], tokens)
    matrix = tensors["lm_head.weight" if name == "one" else "lm_heads.1.weight"]
    matrix = matrix[tokens] if name == "rows of all" else matrix
    hidden = np.random.default_rng(1).normal(0, 1, (2, WIDTH)).astype(np.float32)
    logits = medusa.own_logits(found.params, config, hidden, 1)
    np.testing.assert_allclose(logits, hidden @ matrix.T, rtol=1e-5, atol=1e-5)
    head = Rows(config, found.params).head
    scores, vocabulary = head.own_logits(DecoderParams(TARGET.params, found.params), hidden, 1)
    assert scores.shape == (2, 5)
    np.testing.assert_array_equal(vocabulary.token_ids, tokens)
    assert specjax.load_drafter(folder, TARGET).spec == NewestStateDrafter(config)


def test_medusa_of_vllm_with_one_matrix_stored_as_the_first(tmp_path):
    config = MedusaConfig(**SIZES, shares_head=True)
    tensors = random_tensors(medusa.weights_of(config, OF_VLLM))
    tensors["lm_heads.0.weight"] = tensors.pop("lm_head.weight")
    tensors["token_map"] = np.arange(VOCAB)  # of all tokens says nothing
    prefixed = {f"medusa_heads.{name}": tensor for name, tensor in tensors.items()}
    raw = {"model_type": "medusa", "original_lm_head": True, "vocab_size": VOCAB}
    for stored in (tensors, prefixed):
        found = read_medusa(write(tmp_path, raw, stored), TARGET.config, jnp.float32)
        assert found.config == config
        np.testing.assert_array_equal(found.params["lm_head"], tensors["lm_heads.0.weight"])


@pytest.mark.parametrize(
    ("tokens", "match"),
    [
        (None, "truncated_vocab_size=5 .* and there is none"),
        (np.arange(4), r"and it is int64\[4\]"),
        (np.arange(5, dtype=np.float32), r"and it is float32\[5\]"),
        (np.array([7, 2, 60, 33, 7]), "5 different tokens"),
        (np.array([7, 2, 60, 33, VOCAB]), "5 different tokens"),
    ],
)
def test_token_maps_that_are_refused(tmp_path, tokens, match):
    config = MedusaConfig(**SIZES, own_vocab_size=5)
    tensors = random_tensors(medusa.weights_of(config, OF_VLLM))
    tensors |= {} if tokens is None else {"token_map": tokens}
    raw = {"model_type": "medusa", "vocab_size": VOCAB, "truncated_vocab_size": 5}
    with pytest.raises(ValueError, match=match):
        read_medusa(write(tmp_path, raw, tensors), TARGET.config, jnp.float32)


@pytest.mark.full
@pytest.mark.parametrize("method", quick(["medusa", "mlp_speculator"], "medusa"))
def test_methods_of_configs(tmp_path, method):
    is_medusa = method == "medusa"
    leaves = (
        medusa.weights_of(HEADS["Medusa"]) if is_medusa else mlp_speculator.weights_of(HEADS["MLP"])
    )
    raw = {"model_type": "medusa"} if is_medusa else mlp_raw()
    folder = write(tmp_path, raw, random_tensors(leaves))
    config = {"method": method, "model": str(folder), "num_speculative_tokens": 2}
    out = specjax.generate(TARGET, [1, 2, 3], speculative_config=config)
    assert out.stats.acceptance.num_drafted > 0
    with pytest.raises(ValueError, match=f"holds a head of method '{method}'"):
        specjax.generate(TARGET, [1, 2], speculative_config=config | {"method": "eagle"})


@pytest.mark.parametrize(
    ("raw", "change", "match"),
    [
        (mlp_raw(emb_dim=16), dict, "for a target of 16 hidden numbers"),
        (mlp_raw(n_predict=2), dict, "no use for"),
        (mlp_raw(n_predict=4), dict, "lacks 5 of the 20 tensors of an MLP speculator"),
        (mlp_raw(inner_dim=25), dict, "not those of its config.json"),
        (mlp_raw(inner_dim=-1), dict, "inner_dim"),
        (mlp_raw(tie_weights="yes"), dict, "tie_weights"),
        (mlp_raw(), without("ln.1.bias"), "ln.1.bias"),
        (mlp_raw(), put("d2t", lambda _: np.arange(VOCAB)), "no use for: d2t"),
    ],
)
def test_what_is_refused_of_mlp_speculators(tmp_path, raw, change, match):
    tensors = change(random_tensors(mlp_speculator.weights_of(HEADS["MLP"])))
    with pytest.raises(ValueError, match=match):
        read_mlp_speculator(write(tmp_path, raw, tensors), TARGET.config, jnp.float32)


@pytest.mark.parametrize(
    ("more", "change", "match"),
    [
        ({"truncated_vocab_size": 20, "vocab_size": VOCAB}, dict, "truncated_vocab_size"),
        ({"vocab_size": 10**6}, dict, "1000000 tokens"),
        ({"hidden_size": 16}, dict, "for a target of 16 hidden numbers"),
        ({"logit_scale": 0.5}, dict, "logit_scale=0.5 is not supported"),
        ({}, without("0.0.linear.weight"), "0.0.linear.weight"),
        ({}, without("1.0.linear.bias"), "1.0.linear.bias"),
        ({}, without("2.1.weight"), "2.1.weight"),
        ({}, put("0.1.weight", lambda w: w[:-1]), "60 tokens"),
        ({}, put("0.0.linear.weight", lambda w: w[:, :-1]), "0.0.linear.weight is"),
        ({}, put("lm_head.weight", lambda w: np.ones((3, 3), np.float32)), "no use for"),
        ({}, put("d2t", lambda _: np.arange(VOCAB)), "no use for: d2t"),
        ({}, put("900.0.linear.weight", lambda w: np.ones((3, 3), np.float32)), "901 heads"),
    ],
)
def test_what_is_refused_of_medusa(tmp_path, more, change, match):
    tensors = change(random_tensors(medusa.weights_of(HEADS["Medusa"])))
    folder = write(tmp_path, {"medusa_num_heads": 3} | more, tensors)
    with pytest.raises(ValueError, match=match):
        read_medusa(folder, TARGET.config, jnp.float32)
    with pytest.raises(ValueError, match="reads the last hidden state"):
        read_medusa(folder, TARGET.config, jnp.float32, aux_layer_ids=[1])


def test_heads_of_another_target_are_refused():
    loaded = make_head("MLP")
    config = dataclasses.replace(loaded.spec.config, aux_layers=(1,))
    other = dataclasses.replace(loaded, spec=NewestStateDrafter(config))
    with pytest.raises(ValueError, match="and 1 layers"):
        specjax.load_drafter(other, TARGET)


def test_work_is_that_of_one_draft_token():
    proj = INNER * WIDTH + 2 * INNER * INNER
    for name in ("MLP", "MLP, tied"):
        (work,) = make_head(name).spec.work(TARGET.config, jnp.bfloat16)
        assert work.weight_bytes == 2 * ((proj + 3 * VOCAB * INNER) // 3)
    (work,) = make_head("Medusa with the target's head").spec.work(TARGET.config, jnp.bfloat16)
    assert work.weight_bytes == 2 * (WIDTH * WIDTH + WIDTH + VOCAB * WIDTH)
    assert work.context_bytes == 0
