"""Heads of published classes with random weights: their files, and what they draft over a text.

Each builder imports the package that it is of, and skips the test where that is not installed. A
head reads the tables of `head_equations.TARGET` where its files hold none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from head_equations import TARGET, VOCAB
from head_folders import vocabulary_maps

WIDTH, DRAFT_VOCAB, MASK, BLOCK = TARGET.config.hidden_size, 20, 60, 4
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "attn_implementation": "eager",
    # Neither is what a reader would take for lack of a word; the epsilon is large enough to show.
    "rms_norm_eps": 0.01,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}


class Published(NamedTuple):
    """A head of a published class.

    Attributes:
      save: writes its files to a folder, as its package does.
      logits: (tokens, taps, root) -> f32[2, vocab] of two drafts after tokens[root], each the
        likeliest; taps [n, captured, width] are of all tokens.
      captured: the layers of the target whose inputs it was trained to read; None: its files do
        not say.
      confidence: (tokens, taps, root) -> the same of its confidence head, f32[2]; None without.
    """

    save: Callable[[Path], Any]
    logits: Callable[..., np.ndarray]
    captured: tuple[int, ...] | None = None
    confidence: Callable[..., np.ndarray] | None = None


def torch_and(*names: str) -> list[Any]:
    """Returns torch and other modules; skips the test if one is not installed."""
    return [pytest.importorskip(name) for name in ("torch", *names)]


def randomised(model: Any, seed: int = 3) -> Any:
    """Returns a model with weights of a seed in place: norms around 1, all else small."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(seed)
    for name, leaf in model.named_parameters():
        new = rng.standard_normal(tuple(leaf.shape)) / 4
        is_base = "norm" in name or "base_kernel" in name
        leaf.data = torch.tensor(new + 1 if is_base else new, dtype=torch.float32)
    return model.eval()


def lend_tables(model: Any, *names: str) -> None:
    """Has tables of a model be the target's."""
    torch = pytest.importorskip("torch")
    target = TARGET.params
    tables = {
        "embed_tokens": target["embed_tokens"],
        "lm_head": target.get("lm_head", target["embed_tokens"]),
    }
    for name in names:
        getattr(model, name).weight.data = torch.tensor(np.asarray(tables[name]))


def target_head() -> Any:
    """Returns the target's head as a module of torch."""
    torch = pytest.importorskip("torch")
    head = torch.nn.Linear(WIDTH, VOCAB, bias=False)
    holder = torch.nn.Module()
    holder.lm_head = head
    lend_tables(holder, "lm_head")
    return head


def target_embedding(token_ids: Any) -> Any:
    """Returns rows [1, n, width] of the target's embedding, of token ids [n]."""
    torch = pytest.importorskip("torch")
    return torch.tensor(np.asarray(TARGET.params["embed_tokens"]))[token_ids][None]


def map_vocabulary(model: Any) -> None:
    """Has a model say DRAFT_VOCAB of the target's tokens."""
    torch = pytest.importorskip("torch")
    for name, leaf in vocabulary_maps(DRAFT_VOCAB, VOCAB).items():
        getattr(model, name).data.copy_(torch.tensor(leaf))


def in_target_vocabulary(model: Any, logits: Any) -> np.ndarray:
    """Returns f32[vocab], -inf for tokens that a head cannot say."""
    logits = logits.detach().numpy()
    if len(logits) == VOCAB:
        return logits
    full = np.full(VOCAB, -np.inf, np.float32)
    full[np.arange(len(logits)) + model.d2t.numpy()] = logits
    return full


@contextlib.contextmanager
def outputs_of(module: Any) -> Iterator[list[Any]]:
    """Gives a list of what a module of a model returns, each time that it is called."""
    found: list[Any] = []
    hook = module.register_forward_hook(lambda _, __, output: found.append(output.detach()))
    yield found
    hook.remove()


def flat(torch: Any, taps: np.ndarray) -> Any:
    """Returns hidden states of all captured layers side by side, [1, n, captured * width]."""
    return torch.tensor(taps.reshape(1, len(taps), -1))


# speculators.


def of_folder(kind: Any, folder: Path) -> Any:
    """Returns a model of `speculators` whose config and weights a folder holds."""
    config = kind.config_class.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    return kind.from_pretrained(folder, config=config).eval()


def speculators_eagle3(
    kind: str = "llama", num_layers: int = 1, folder: Path | None = None, **flags: Any
) -> Published:
    """EAGLE-3 of `speculators`: its training forward, whose steps are those of serving.

    Args:
      folder: what is read in place of a model of random weights, here and below.
    """
    own = flags.pop("layers", {})
    torch, module = torch_and("speculators.models.eagle3")
    config = module.Eagle3SpeculatorConfig(
        transformer_layer_config=_layers(kind, num_layers, **own),
        eagle_aux_hidden_state_layer_ids=[2, 3, 5],
        speculators_config=_proposals("eagle3"),
        **{"draft_vocab_size": DRAFT_VOCAB} | flags,
    )
    if folder is not None:
        model = of_folder(module.Eagle3DraftModel, folder)
    else:
        model = randomised(module.Eagle3DraftModel(config))
        if config.draft_vocab_size != VOCAB:
            map_vocabulary(model)

    def steps(tokens, taps, root, count, draft=0):
        """Returns logits at the last pair before the root, of each step."""
        ids = torch.tensor([*tokens[1 : root + 1], draft])[None]
        with outputs_of(model.lm_head) as found:
            model(
                hidden_states=flat(torch, np.concatenate([taps[:root], taps[:1]])),
                input_ids=ids,
                document_ids=torch.zeros_like(ids),
                ttt_steps=count,
            )
        return [in_target_vocabulary(model, each[0, root - 1]) for each in found]

    def logits(tokens, taps, root):
        (first,) = steps(tokens, taps, root, 1)
        return np.stack(steps(tokens, taps, root, 2, int(np.argmax(first))))

    return Published(model.save_pretrained, logits, (2, 3, 5))


def speculators_peagle(num_layers: int = 2, folder: Path | None = None, **flags: Any) -> Published:
    """P-EAGLE of `speculators`, at the pairs before a root and one mask after them."""
    torch, module, core = torch_and("speculators.models.peagle", "speculators.models.peagle.core")
    config = module.PEagleSpeculatorConfig(
        transformer_layer_config=_layers("llama", num_layers),
        eagle_aux_hidden_state_layer_ids=[2, 3, 5],
        draft_vocab_size=DRAFT_VOCAB,
        mask_token_id=MASK,
        speculators_config=_proposals("peagle"),
        **flags,
    )
    if folder is not None:
        model = of_folder(module.PEagleDraftModel, folder)
    else:
        model = randomised(module.PEagleDraftModel(config))
        map_vocabulary(model)

    def logits(tokens, taps, root):
        ids = torch.tensor([*tokens[1 : root + 1], 0])[None]
        places = torch.tensor([*range(root), root - 1]), torch.tensor([0] * root + [1])
        with pytest.MonkeyPatch.context() as patched, outputs_of(model.lm_head) as found:
            # What is drawn is which chains are trained on; the loss over them is not wanted.
            patched.setattr(core, "generate_cod_sample_indices", lambda **_: places)
            patched.setattr(core, "compute_metrics", lambda **_: (None, None))
            model(
                hidden_states=flat(torch, np.concatenate([taps[:root], taps[:1]])),
                input_ids=ids,
                document_ids=torch.zeros_like(ids),
                verifier_last_hidden_states=torch.zeros(1, root + 1, WIDTH),
            )
        return np.stack([in_target_vocabulary(model, each) for each in found[0][0, -2:]])

    return Published(model.save_pretrained, logits, (2, 3, 5))


def speculators_mtp(kind: str = "qwen3") -> Published:
    """MTP of `speculators`; its second draft is the first of a text that is one pair longer.

    Its training forward has every pair of a second step read outputs of the first, where a server
    has keys and values of the first step in its cache.
    """
    torch, module = torch_and("speculators.models.mtp")
    config = module.MTPSpeculatorConfig(
        transformer_layer_config=_layers(kind, 1), speculators_config=_proposals("mtp")
    )
    model = randomised(module.MTPDraftModel(config), seed=4)
    lend_tables(model, "embed_tokens", "lm_head")

    def logits(tokens, taps, root):
        tokens, hidden, found = [*tokens[: root + 1]], torch.tensor(taps[:root, 0])[None], []
        for _ in range(2):
            ids, padded = torch.tensor([*tokens, 0])[None], torch.cat([hidden, hidden[:, :2]], 1)
            with outputs_of(model.mtp_layers[0]) as outputs:
                model(input_ids=ids, hidden_states=padded)
            (said,) = outputs
            found.append(model.lm_head(said[0, -1]).detach().numpy())
            tokens.append(int(np.argmax(found[-1])))
            hidden = torch.cat([hidden, said[:, -1:]], dim=1)
        return np.stack(found)

    return Published(model.save_pretrained, logits)


def speculators_block(
    kind: str, config_name: str, class_name: str, folder: Path | None = None, **flags: Any
) -> Published:
    """DFlash, DFlash2 or DSpark of `speculators`, over the block of one anchor."""
    torch, module = torch_and(f"speculators.models.{kind}")
    own = flags.pop("layers", {})
    vocab = {} if kind == "dflash2" else {"draft_vocab_size": DRAFT_VOCAB}
    config = getattr(module, config_name)(
        transformer_layer_config=_layers("qwen3", 2, **own),
        aux_hidden_state_layer_ids=[2, 5],
        block_size=BLOCK,
        mask_token_id=MASK,
        speculators_config=_proposals(kind),
        **{"draft_vocab_size": VOCAB} | vocab | flags,
    )
    if folder is not None:
        model = of_folder(getattr(module, class_name), folder)
        config = model.config
    else:
        model = randomised(getattr(module, class_name)(config))
        if config.draft_vocab_size != VOCAB:
            map_vocabulary(model)
    lend_tables(model, "embed_tokens")
    if config.draft_vocab_size == VOCAB:
        lend_tables(model, "lm_head")
    first = 0 if config.sample_from_anchor else 1

    def block(tokens, taps, root):
        """Returns hidden states and logits [block size, ...] of the block at a root."""
        after = BLOCK + 1  # no anchor is drawn from the last block of a text
        ids = torch.tensor([*tokens[: root + 1], *[0] * after])[None]
        is_anchor = torch.zeros(1, root + 1 + after)
        is_anchor[0, root] = 1
        hidden = np.concatenate([taps[:root], np.ones((after + 1, *taps.shape[1:]), np.float32)])
        hidden, said, *_ = model._backbone_forward(
            hidden_states=flat(torch, hidden),
            input_ids=ids,
            loss_mask=is_anchor,
            verifier_last_hidden_states=torch.zeros(1, root + 1 + after, WIDTH),
            document_ids=torch.zeros_like(ids),
            max_anchors=1,
        )
        return hidden.detach()[0], said.detach()[0]

    def drafts(tokens, taps, root):
        """Returns logits of two drafts, and the token before each."""
        hidden, said = block(tokens, taps, root)
        before, found = [int(tokens[root])], []
        for place in range(first, first + 2):
            # The token before row `place` of the block, for all rows; later ones are not read.
            past = torch.tensor([*before[:1] * first, *before, *[0] * BLOCK][:BLOCK])[None]
            scores = said[place]
            if getattr(model, "markov_head", None) is not None:
                scores = (
                    scores
                    + model.markov_head.block_bias(prev_token_ids=past, hidden_states=hidden[None])[
                        0, place
                    ]
                )
            if kind == "dflash2":
                ids, edges = model.candidate_selector.select(
                    said[place][None], hidden[place][None], past[:, place]
                )
                scores = torch.full_like(scores, -torch.inf).scatter(0, ids[0], edges[0])
            found.append(in_target_vocabulary(model, scores))
            before.append(int(np.argmax(found[-1])))
        return np.stack(found), before[:2]

    def confidence(tokens, taps, root):
        hidden = block(tokens, taps, root)[0][first : first + 2]
        if config.confidence_head_with_markov:
            before = torch.tensor(drafts(tokens, taps, root)[1])
            hidden = torch.cat([hidden, model.markov_head.prev_embeddings(before)], dim=-1)
        return torch.sigmoid(model.confidence_head(hidden)).detach().numpy()

    has_confidence = getattr(model, "confidence_head", None) is not None
    return Published(
        model.save_pretrained,
        lambda *text: drafts(*text)[0],
        (2, 5),
        confidence if has_confidence else None,
    )


def _layers(kind: str, num_layers: int, **more: Any) -> Any:
    """Returns what transformers calls the config of some layers."""
    (_, transformers) = torch_and("transformers")
    of = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[kind]
    return of(**SIZES | {"num_hidden_layers": num_layers} | more)


def _proposals(algorithm: str) -> Any:
    """Returns what configs of `speculators` say of a target and of how many tokens are drafted."""
    config, greedy = (
        pytest.importorskip(f"speculators.{name}") for name in ("config", "proposals.greedy")
    )
    return config.SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[greedy.GreedyTokenProposalConfig(speculative_tokens=1)],
        default_proposal_method="greedy",
        verifier=config.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
