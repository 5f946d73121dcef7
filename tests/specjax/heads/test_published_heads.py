"""Our drafters against published classes with the same weights, to 1e-4 in float32.

Each head is written by its own package, read by `load_drafter`, and drafts over one text: after a
prompt in chunks, after a rejection, and after all of its drafts were accepted. `docs/heads.md` says
which versions were compared.
"""

import functools

import golden_heads
import numpy as np
import published_by_others as others
import published_heads as published
import pytest
import test_eagle_files

import specjax

pytestmark = [
    pytest.mark.reference,
    pytest.mark.filterwarnings("ignore"),  # of other packages
]
DEEP = test_eagle_files.TARGET

eagle3, peagle = published.speculators_eagle3, published.speculators_peagle
block = published.speculators_block
dflash = functools.partial(block, "dflash", "DFlashSpeculatorConfig", "DFlashDraftModel")
dflash2 = functools.partial(
    block,
    "dflash2",
    "DFlash2SpeculatorConfig",
    "DFlash2DraftModel",
    conv_group_size=8,
    selector_rank=6,
    selector_top_k=7,
)
dspark = functools.partial(
    block, "dspark", "DSparkSpeculatorConfig", "DSparkDraftModel", markov_rank=6
)
ANCHOR = {"sample_from_anchor": True}
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    # Longer than text and block. Past it, training has a block see what its first token sees, and
    # one context more.
    "sliding_window": 32,
    "use_sliding_window": True,
}
LLAMA31 = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
}
block_of = others.block_of
Z_LAB, SPECFORGE = {"package": "dflash.model"}, {"package": "specforge.modeling.draft"}
OF_DFLASH2 = {
    "class_name": "DFlash2DraftModel",
    "said": {
        "conv_kernel_size": 2,
        "conv_group_size": 8,
        "selector_rank": 6,
        "selector_top_k": 7,
    },
}
OF_DSPARK = {
    "class_name": "DSparkDraftModel",
    "said": {
        "projector_type": "dspark",
        "markov_rank": 6,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "confidence_head_alpha": 1.0,
    },
}

SHALLOW = published.TARGET
BY_PAIRS, BY_MASKS, BY_BLOCK, BY_NEWEST = (
    golden_heads.by_pairs,
    golden_heads.by_masks,
    golden_heads.by_block,
    golden_heads.by_newest,
)
# Builder and its arguments, the target that the head is for, and how our drafter is asked.
HEADS = {
    "speculators EAGLE-3": (eagle3, {}, DEEP, BY_PAIRS),
    "speculators EAGLE-3 of Llama 3.1": (
        eagle3,
        {"layers": LLAMA31 | {"attention_bias": True, "mlp_bias": True}},
        DEEP,
        BY_PAIRS,
    ),
    "speculators EAGLE-3 of two layers": (
        eagle3,
        {"kind": "qwen3", "num_layers": 2, "norm_before_residual": True},
        DEEP,
        BY_PAIRS,
    ),
    "speculators EAGLE-3 with a norm before fc": (eagle3, {"norm_before_fc": True}, DEEP, BY_PAIRS),
    "speculators EAGLE-3.1": (eagle3, {"fc_norm": True, "norm_output": True}, DEEP, BY_PAIRS),
    "speculators EAGLE-3 of all tokens": (
        eagle3,
        {"draft_vocab_size": published.VOCAB},
        DEEP,
        BY_PAIRS,
    ),
    "speculators P-EAGLE": (peagle, {}, DEEP, BY_MASKS),
    "speculators P-EAGLE with norms": (
        peagle,
        {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
        DEEP,
        BY_MASKS,
    ),
    "speculators MTP": (published.speculators_mtp, {}, SHALLOW, BY_PAIRS),
    "speculators DFlash": (dflash, {}, DEEP, BY_BLOCK),
    "speculators DFlash from the anchor": (dflash, ANCHOR, DEEP, BY_BLOCK),
    "speculators DFlash with biases": (
        dflash,
        {"layers": {"attention_bias": True}},
        DEEP,
        BY_BLOCK,
    ),
    "speculators DFlash with a window": (dflash, {"layers": SLIDING}, DEEP, BY_BLOCK),
    "speculators DFlash2": (dflash2, {}, DEEP, BY_BLOCK),
    "speculators DSpark": (dspark, {}, DEEP, BY_BLOCK),
    "speculators DSpark, gated": (dspark, {"markov_head_type": "gated"}, DEEP, BY_BLOCK),
    "speculators DSpark, recurrent": (dspark, {"markov_head_type": "rnn"}, DEEP, BY_BLOCK),
    "speculators DSpark of masks": (
        dspark,
        {"sample_from_anchor": False, "confidence_head_with_markov": False},
        DEEP,
        BY_BLOCK,
    ),
    "EAGLE": (others.eagle, {}, SHALLOW, BY_PAIRS),
    "EAGLE of two layers": (others.eagle, {"num_layers": 2}, SHALLOW, BY_PAIRS),
    "EAGLE-3": (others.eagle3, {}, DEEP, BY_PAIRS),
    "Medusa": (others.medusa, {}, SHALLOW, BY_NEWEST),
    "Medusa of two blocks": (others.medusa, {"num_layers": 2}, SHALLOW, BY_NEWEST),
    "MLP speculator": (others.mlp_speculator, {}, SHALLOW, BY_NEWEST),
    "MLP speculator, tied": (
        others.mlp_speculator,
        {"tie_weights": True, "scale_input": True},
        SHALLOW,
        BY_NEWEST,
    ),
    "SpecForge EAGLE-3": (others.specforge_eagle3, {}, DEEP, BY_PAIRS),
    "SpecForge EAGLE-3 with norms": (others.specforge_eagle3, {"fc_norm": True}, DEEP, BY_PAIRS),
    "SpecForge P-EAGLE": (others.specforge_peagle, {}, DEEP, BY_MASKS),
    "SpecForge DFlash": (block_of, SPECFORGE | {"class_name": "DFlashDraftModel"}, DEEP, BY_BLOCK),
    "SpecForge DSpark": (block_of, SPECFORGE | OF_DSPARK, DEEP, BY_BLOCK),
    "z-lab DFlash": (block_of, Z_LAB | {"class_name": "DFlashDraftModel"}, DEEP, BY_BLOCK),
    "z-lab DFlash2": (block_of, Z_LAB | OF_DFLASH2, DEEP, BY_BLOCK),
    "DeepSpec DSpark": (others.deepspec_dspark, {}, DEEP, BY_BLOCK),
    "DeepSpec DSpark, gated": (
        others.deepspec_dspark,
        {"markov_head_type": "gated"},
        DEEP,
        BY_BLOCK,
    ),
    "DeepSpec DSpark, recurrent": (
        others.deepspec_dspark,
        {"markov_head_type": "rnn"},
        DEEP,
        BY_BLOCK,
    ),
    "PARD": (others.pard, {}, SHALLOW, golden_heads.by_model),
    "DeepSpec EAGLE-3": (others.deepspec_eagle3, {}, DEEP, BY_PAIRS),
}


@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_of_the_published_class(tmp_path, name):
    build, arguments, target, by = HEADS[name]
    head = build(**arguments)
    head.save(tmp_path)
    loaded = specjax.load_drafter(tmp_path, target)
    config = loaded.spec.config
    aux_layers = getattr(config, "aux_layers", ())
    assert head.captured in (None, aux_layers)
    tokens, taps = golden_heads.text(len(aux_layers))
    expected = np.stack([head.logits(tokens, taps, root) for root in golden_heads.ROOTS])
    found = by(config, loaded.params, tokens, taps)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    # A draft is no matter of rounding, or a wrong one would change what is compared after it.
    best = np.sort(np.where(np.isfinite(expected), expected, -1e9), axis=-1)[..., -2:]
    assert np.min(best[..., 1] - best[..., 0]) > 1e-3
    if head.confidence is not None:
        sure = [head.confidence(tokens, taps, root) for root in golden_heads.ROOTS]
        found = golden_heads.sure_by_block(config, loaded.params, tokens, taps)
        np.testing.assert_allclose(found, np.stack(sure), rtol=0, atol=1e-4)


# What save_pretrained writes, by namings, is read by the classes that publish them.
WRITTEN = {
    "speculators EAGLE-3": "speculators",
    "speculators EAGLE-3 of Llama 3.1": "speculators",
    "speculators EAGLE-3 of two layers": "speculators",
    "speculators EAGLE-3 with a norm before fc": "speculators",
    "speculators EAGLE-3.1": "speculators",
    "speculators EAGLE-3 of all tokens": "speculators",
    "speculators P-EAGLE": "speculators",
    "speculators P-EAGLE with norms": "speculators",
    "speculators DFlash": "speculators",
    "speculators DFlash from the anchor": "speculators",
    "speculators DFlash with biases": "speculators",
    "speculators DFlash with a window": "speculators",
    "speculators DFlash2": "speculators",
    "speculators DSpark": "speculators",
    "speculators DSpark, gated": "speculators",
    "speculators DSpark, recurrent": "speculators",
    "speculators DSpark of masks": "speculators",
    "EAGLE": "eagle",
    "EAGLE of two layers": "eagle",
    "EAGLE-3": "specforge",
    "SpecForge EAGLE-3": "specforge",
    "SpecForge EAGLE-3 with norms": "specforge",
    "SpecForge P-EAGLE": "specforge",
    "SpecForge DFlash": "specforge",
    "SpecForge DSpark": "specforge",
    "z-lab DFlash": "z-lab",
    "z-lab DFlash2": "z-lab",
    "DeepSpec DSpark": "deepspec",
    "DeepSpec DSpark, gated": "deepspec",
    "DeepSpec DSpark, recurrent": "deepspec",
    "Medusa": "medusa",
    "Medusa of two blocks": "medusa",
    "MLP speculator": "ibm",
    "MLP speculator, tied": "ibm",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_published_classes_read_what_was_written(tmp_path, name):
    build, arguments, target, by = HEADS[name]
    build(**arguments).save(tmp_path)
    head = specjax.load_drafter(tmp_path, target)
    # `speculators` reads the target's config and tables, from where the head's files say they are.
    specjax.save_pretrained(target, tmp_path / "target")
    target = specjax.load_model(tmp_path / "target")
    specjax.save_pretrained(head, tmp_path / "ours", naming=WRITTEN[name], target=target)
    theirs = build(**arguments, folder=tmp_path / "ours")
    tokens, taps = golden_heads.text(len(getattr(head.spec.config, "aux_layers", ())))
    expected = np.stack([theirs.logits(tokens, taps, root) for root in golden_heads.ROOTS])
    found = by(head.spec.config, head.params, tokens, taps)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    if theirs.confidence is not None:
        sure = [theirs.confidence(tokens, taps, root) for root in golden_heads.ROOTS]
        found = golden_heads.sure_by_block(head.spec.config, head.params, tokens, taps)
        np.testing.assert_allclose(found, np.stack(sure), rtol=0, atol=1e-4)
