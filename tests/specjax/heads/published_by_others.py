"""Heads of published classes of others than `speculators`; see `published_heads`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from published_heads import (
    BLOCK,
    DRAFT_VOCAB,
    MASK,
    SIZES,
    VOCAB,
    WIDTH,
    Published,
    flat,
    in_target_vocabulary,
    map_vocabulary,
    randomised,
    target_embedding,
    target_head,
    torch_and,
)

NUM_DRAFTS, NUM_TARGET_LAYERS, THETA = 2, 6, SIZES["rope_parameters"]["rope_theta"]


def save_as(model: Any, raw: dict[str, Any], names: Any = lambda name: name) -> Any:
    """Returns a function that writes a state dict with a config.json, as scripts of papers do."""
    _, of_files = torch_and("safetensors.torch")

    def save(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(raw))
        tensors = {names(name): leaf.clone() for name, leaf in model.state_dict().items()}
        of_files.save_file(tensors, folder / "model.safetensors")

    return save


def of_folder(kind: Any, folder: Path) -> Any:
    """Returns a model of a class of transformers whose config and weights a folder holds."""
    return kind.from_pretrained(folder, attn_implementation="eager").eval()


def with_weights(model: Any, folder: Path) -> Any:
    """Returns a model with the weights of a folder, which must be all that it has, in place."""
    (_, of_files) = torch_and("safetensors.torch")
    model.load_state_dict(of_files.load_file(folder / "model.safetensors"))
    return model.eval()


def one_by_one(torch: Any, say: Any, tokens: Any, root: int) -> np.ndarray:
    """Returns logits of two drafts; `say` gives those after a text, and what else it keeps.

    Args:
      say: (token ids [1, n], of pairs from the second token on) -> f32[vocab].
    """
    found, text = [], [*map(int, tokens[: root + 1])]
    for _ in range(NUM_DRAFTS):
        found.append(say(torch.tensor(text[1:])[None]))
        text.append(int(np.argmax(found[-1])))
    return np.stack(found)


# EAGLE, by its authors.


def eagle(num_layers: int = 1, folder: Path | None = None) -> Published:
    """EAGLE, whose own output is the hidden state of the next pair."""
    torch, configs, cnets = torch_and("eagle.model.configs", "eagle.model.cnets1")
    raw = SIZES | {"num_hidden_layers": num_layers}
    said = raw if folder is None else json.loads((folder / "config.json").read_text())
    model = cnets.Model(_plain_ropes(configs.EConfig(**said)), bias=said.get("bias", True))
    model = randomised(model) if folder is None else with_weights(model, folder)
    head = target_head()

    def logits(tokens, taps, root):
        hidden = torch.tensor(taps[:root, 0])[None]

        def say(ids):
            nonlocal hidden
            with torch.no_grad():
                said = model(hidden, ids)
            hidden = torch.cat([hidden, said[:, -1:]], dim=1)
            return head(said[0, -1]).detach().numpy()

        return one_by_one(torch, say, tokens, root)

    raw |= {"architectures": ["LlamaForCausalLM"]}
    return Published(save_as(model, raw), logits)


def eagle3(folder: Path | None = None) -> Published:
    """EAGLE-3, run with its cache of keys and values."""
    # The module of EAGLE-3 has the name that EAGLE's had before, and stands beside that one.
    torch, configs, cnets, _ = torch_and(
        "eagle.model.configs", "eagle.model.cnets", "eagle.model.cnets1"
    )
    raw = SIZES | {"num_hidden_layers": 1, "draft_vocab_size": DRAFT_VOCAB}
    said = raw if folder is None else json.loads((folder / "config.json").read_text())
    model = cnets.Model(_plain_ropes(configs.EConfig(**said)))
    if folder is not None:
        model = with_weights(model, folder)
    else:
        model = randomised(model)
        map_vocabulary(model)

    def logits(tokens, taps, root):
        hidden, ids = flat(torch, taps[:root]), torch.tensor(tokens[1 : root + 1])[None].long()
        found, cache = [], None
        with torch.no_grad():
            for _ in range(NUM_DRAFTS):
                hidden, cache = model(hidden, ids, past_key_values=cache, use_cache=True)
                hidden = hidden[:, -1:]
                said = model.lm_head(model.norm(hidden[0, 0]))
                found.append(in_target_vocabulary(model, said))
                ids = torch.tensor([[int(np.argmax(found[-1]))]])
        return np.stack(found)

    raw |= {"architectures": ["LlamaForCausalLMEagle3"]}
    return Published(save_as(model, raw), logits)


def _plain_ropes(config: Any) -> Any:
    """Returns a config that says nothing of scaling, in place of what later transformers write."""
    config.rope_scaling, config.rope_theta = None, THETA
    return config


# Medusa, by its authors.


def medusa(num_layers: int = 1, folder: Path | None = None) -> Published:
    """Medusa, whose heads say the second token after a hidden state and those that follow."""
    torch, module = torch_and("medusa.model.medusa_model")
    count = 3
    if folder is not None:
        said = module.MedusaConfig.from_pretrained(folder)
        count, num_layers = said.medusa_num_heads, said.medusa_num_layers
    base = SimpleNamespace(
        config=None,
        lm_head=target_head(),
        dtype=torch.float32,
        device="cpu",
        model=lambda **given: (given["input_ids"],),
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module.AutoTokenizer, "from_pretrained", lambda _: None)
        model = randomised(module.MedusaModel(base, count, num_layers))
    if folder is not None:
        (_, of_files) = torch_and("safetensors.torch")
        stored = of_files.load_file(folder / "medusa_lm_head.safetensors")
        model.medusa_head.load_state_dict(stored)

    def logits(tokens, taps, root):
        hidden = torch.tensor(taps[root - 1 : root, 0])[None]
        return model(input_ids=hidden)[:NUM_DRAFTS, 0, 0].detach().numpy()

    def save(folder: Path) -> None:
        module.MedusaConfig(count, num_layers).save_pretrained(folder)
        torch.save(model.medusa_head.state_dict(), folder / "medusa_lm_head.pt")

    return Published(save, logits)


# MLP speculators, by IBM.


def mlp_speculator(folder: Path | None = None, **flags: Any) -> Published:
    """The forward of training, over the hidden state before a root and the tokens from it on."""
    torch, module = torch_and("fms_extras.models.speculator")
    sizes = {"emb_dim": WIDTH, "inner_dim": 24, "vocab_size": VOCAB, "n_predict": 3} | flags
    if folder is not None:
        said = json.loads((folder / "config.json").read_text())
        sizes = {name: said[name] for name in (*sizes, "tie_weights", "scale_input")}
    model = randomised(module.MLPSpeculator(**sizes))
    if folder is not None:
        (_, of_files) = torch_and("safetensors.torch")
        stored = of_files.load_file(folder / "model.safetensors")
        stored = {name.removeprefix("speculator."): leaf for name, leaf in stored.items()}
        # Of tied weights the first copy is stored.
        missing, unknown = model.load_state_dict(stored, strict=False)
        assert not unknown
        assert bool(missing) == sizes["tie_weights"]

    def logits(tokens, taps, root):
        hidden, found = torch.tensor(taps[root - 1 : root, 0])[None], []
        text = [int(tokens[root]), 0, 0, 0]
        for place in range(NUM_DRAFTS):
            found.append(model(hidden, torch.tensor(text)[None])[place, 0, 0].detach().numpy())
            text[place + 1] = int(np.argmax(found[-1]))
        return np.stack(found)

    raw = {"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"]}
    return Published(save_as(model, raw | sizes, lambda name: f"speculator.{name}"), logits)


# SpecForge.


def specforge_eagle3(folder: Path | None = None, **flags: Any) -> Published:
    """EAGLE-3 of SpecForge: two steps of its training, with the cache that it keeps."""
    torch, module = torch_and("specforge.modeling.draft.llama3_eagle")
    config = _config_of("LlamaConfig", 1, draft_vocab_size=DRAFT_VOCAB, **flags)
    if folder is not None:
        # Its from_pretrained leaves the tables of its rotations empty under transformers 5.
        kind = module.LlamaForCausalLMEagle3
        model = with_weights(kind(kind.config_class.from_pretrained(folder)), folder)
    else:
        model = randomised(module.LlamaForCausalLMEagle3(config))
        map_vocabulary(model)

    def logits(tokens, taps, root):
        ids, cache, found = [*map(int, tokens[1 : root + 1])], [[], []], []
        with torch.no_grad():
            hidden = model.project_hidden_states(flat(torch, taps[:root]))
            mask = model.prepare_decoder_attention_mask(
                torch.ones(1, root, dtype=torch.bool), hidden, 1, root, 0
            )
            for _ in range(NUM_DRAFTS):
                hidden = model.backbone(
                    model.embed_input_ids(torch.tensor(ids)[None]),
                    hidden,
                    cache,
                    mask,
                    torch.arange(root)[None],
                )
                found.append(in_target_vocabulary(model, model.compute_logits(hidden)[0, -1]))
                ids = [*ids[1:], int(np.argmax(found[-1]))]
        return np.stack(found)

    return Published(model.save_pretrained, logits)


def specforge_peagle(num_layers: int = 2, folder: Path | None = None, **flags: Any) -> Published:
    """P-EAGLE of SpecForge, over pairs and one mask; its config.json lacks the mask's token."""
    torch, module = torch_and("specforge.modeling.draft.peagle")
    config = _config_of("LlamaConfig", num_layers, draft_vocab_size=DRAFT_VOCAB, **flags)
    if folder is not None:
        model = of_folder(module.PEagleDraftModel, folder)
    else:
        model = randomised(module.PEagleDraftModel(config))
        map_vocabulary(model)

    def plain(query, key, value, block_mask, **_):
        """Attention that needs no compiler."""
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )

    def logits(tokens, taps, root):
        ids = torch.tensor([*tokens[1 : root + 1], MASK])[None]
        hidden = torch.cat([flat(torch, taps[:root]), model.mask_hidden], dim=1)
        with pytest.MonkeyPatch.context() as patched, torch.no_grad():
            patched.setattr(module, "compile_friendly_flex_attention", plain)
            said = model.backbone(
                model.embed_input_ids(ids),
                model.project_hidden_states(hidden),
                position_ids=torch.arange(root + 1)[None],
            )
            said = model.compute_logits(said)
        return np.stack([in_target_vocabulary(model, each) for each in said[0, -2:]])

    return Published(_with_mask(model, "mask_token_id"), logits)


# Blocks: z-lab, SpecForge and DeepSpec.


def block_of(
    package: str,
    class_name: str,
    said: dict[str, Any] | None = None,
    folder: Path | None = None,
    **flags: Any,
) -> Published:
    """DFlash, DFlash2 or DSpark as its authors or SpecForge have them: hidden states of a block.

    Args:
      said: what `dflash_config` holds besides.
    """
    torch, module = torch_and(package)
    own = {"target_layer_ids": [1, 4], "mask_token_id": MASK} | (said or {})
    flags = {"block_size": BLOCK, "num_target_layers": NUM_TARGET_LAYERS} | flags
    config = _config_of("Qwen3Config", 2, dflash_config=own, **flags)
    kind = getattr(module, class_name)
    head = target_head()
    model = randomised(kind(config)) if folder is None else of_folder(kind, folder)
    config.architectures = [class_name]

    def block(tokens, taps, root):
        ids = torch.tensor([int(tokens[root]), *[MASK] * (BLOCK - 1)])
        with torch.no_grad():
            return model(
                position_ids=torch.arange(root + BLOCK)[None],
                noise_embedding=target_embedding(ids),
                target_hidden=flat(torch, taps[:root]),
            )

    def logits(tokens, taps, root):
        hidden, root_id = block(tokens, taps, root), torch.tensor([int(tokens[root])])
        with torch.no_grad():
            if getattr(model, "markov_head", None) is not None:
                # Trained with row 0 of a block for its first draft token, as DeepSpec does.
                _, said = model.markov_head.sample_block_tokens(
                    head(hidden), first_prev_token_ids=root_id, hidden_states=hidden
                )
                return said[0, :NUM_DRAFTS].numpy()
            rows = hidden[:, 1:]
            if class_name != "DFlash2DraftModel":
                return head(rows)[0, :NUM_DRAFTS].numpy()
            return selected(rows, root_id)

    def selected(rows, root_id):
        selector, before, found = model.candidate_selector, root_id, []
        for place in range(NUM_DRAFTS):
            row = rows[:, place : place + 1]
            said = model.compute_logits(row, head)
            # Above temperature 0 it gives the law of its candidates, from which scores follow.
            _, ids, law = selector.select(row, said, before, 1.0)
            scores = torch.full((VOCAB,), -torch.inf)
            edges = selector.predecessor_codebook(before) * selector.hidden_projection(row[:, 0])
            edges = edges @ selector.successor_codebook(ids[0, 0]).T
            scores[ids[0, 0]] = said[0, 0, ids[0, 0]] + edges[0]
            law_of = torch.softmax(scores[ids[0, 0]], dim=-1)
            torch.testing.assert_close(law[0, 0], law_of)
            found.append(scores.numpy())
            before = torch.tensor([int(np.argmax(found[-1]))])
        return np.stack(found)

    def confidence(tokens, taps, root):
        hidden = block(tokens, taps, root)[:, :NUM_DRAFTS]
        before = torch.tensor([[int(tokens[root]), int(np.argmax(logits(tokens, taps, root)[0]))]])
        said = model.predict_confidence(hidden, prev_token_ids=before)
        return torch.sigmoid(said).detach().numpy()[0]

    def save(folder: Path) -> None:
        raw = json.loads(json.dumps(config.to_dict()))
        plain = lambda name: name.replace("_codebook.weight", "_codebook")
        save_as(model, raw, plain)(folder)

    has_confidence = getattr(model, "confidence_head", None) is not None
    return Published(save, logits, (2, 5), confidence if has_confidence else None)


def deepspec_dspark(folder: Path | None = None, **flags: Any) -> Published:
    """DSpark of DeepSpec, as its evaluation drafts."""
    torch, module = torch_and("deepspec.modeling.dspark.qwen3")
    defaults = {
        "target_layer_ids": [1, 4],
        "mask_token_id": MASK,
        "num_anchors": 1,
        "block_size": BLOCK,
        "num_target_layers": NUM_TARGET_LAYERS,
        "markov_rank": 6,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "tie_word_embeddings": False,
    }
    config = _config_of("Qwen3Config", 2, **defaults | flags)
    config.architectures = ["Qwen3DSparkModel"]
    model = (
        randomised(module.Qwen3DSparkModel(config))
        if folder is None
        else of_folder(module.Qwen3DSparkModel, folder)
    )

    def block(tokens, taps, root):
        ids = torch.tensor([[int(tokens[root]), *[MASK] * (BLOCK - 1)]])
        with torch.no_grad():
            hidden = model._forward_backbone(
                target_hidden_states=flat(torch, taps[:root]),
                noise_embedding=model.embed_tokens(ids),
                position_ids=torch.arange(root + BLOCK)[None],
                is_causal=False,
            )
            drafts, said = model.sample_draft_tokens(
                model.compute_logits(hidden), first_prev_token_ids=ids[:, 0], hidden_states=hidden
            )
        return hidden, torch.cat([ids[:, :1], drafts[:, :-1]], dim=1), said

    def confidence(tokens, taps, root):
        hidden, before, _ = block(tokens, taps, root)
        said = model.predict_confidence_step(hidden, prev_token_ids=before)
        return torch.sigmoid(said).detach().numpy()[0, :NUM_DRAFTS]

    logits = lambda *text: block(*text)[2][0, :NUM_DRAFTS].numpy()
    return Published(model.save_pretrained, logits, (2, 5), confidence)


def deepspec_eagle3() -> Published:
    """EAGLE-3 of DeepSpec, which names the captured layers by their outputs."""
    torch, module = torch_and("deepspec.modeling.eagle3.qwen3")
    cache_utils = pytest.importorskip("transformers.cache_utils")
    config = _config_of(
        "Qwen3Config",
        1,
        target_layer_ids=[0, 2, 4],
        ttt_length=2,
        step_loss_decay=1.0,
        num_target_layers=NUM_TARGET_LAYERS,
        tie_word_embeddings=False,
    )
    model = randomised(module.Qwen3Eagle3Model(config))

    def logits(tokens, taps, root):
        hidden, ids = flat(torch, taps[:root]), torch.tensor(tokens[1 : root + 1])[None].long()
        mask = torch.full((1, 1, root, root), -torch.inf).triu(1)
        positions, found = torch.arange(root)[None], []
        cache = cache_utils.DynamicCache()
        with torch.no_grad():
            for _ in range(NUM_DRAFTS):
                hidden = model(hidden, ids, positions, past_key_values=cache, attention_mask=mask)[
                    :, -1:
                ]
                found.append(model.compute_logits(hidden)[0, 0].numpy())
                ids, mask = torch.tensor([[int(np.argmax(found[-1]))]]), None
                positions = positions[:, -1:] + 1
        return np.stack(found)

    config.architectures = ["Qwen3Eagle3Model"]
    return Published(model.save_pretrained, logits, (1, 3, 5))


def _config_of(kind: str, num_layers: int, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, kind)(**SIZES | {"num_hidden_layers": num_layers} | more)


# A draft model over masks.


def pard() -> Published:
    """A model of transformers over a text and a mask, as PARD asks it."""
    torch, transformers = torch_and("transformers")
    model = randomised(transformers.LlamaForCausalLM(_config_of("LlamaConfig", 2)))

    def logits(tokens, taps, root):
        ids = torch.tensor([*tokens[: root + 1], *[MASK] * (NUM_DRAFTS - 1)])[None]
        return model(ids).logits[0, -NUM_DRAFTS:].detach().numpy()

    return Published(_with_mask(model, "pard_token"), logits)


def _with_mask(model: Any, key: str) -> Any:
    """Returns a function that saves a model, and adds the mask token to its config.json."""

    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: MASK}))

    return save
