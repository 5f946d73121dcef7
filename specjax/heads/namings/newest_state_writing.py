"""Says Medusa heads and MLP speculators in the namings that they are published in."""

from __future__ import annotations

import functools

from specjax.heads.equations import medusa, mlp_speculator
from specjax.heads.equations.medusa import OF_VLLM, PUBLISHED, MedusaConfig
from specjax.heads.equations.mlp_speculator import MlpSpeculatorConfig
from specjax.heads.namings.head_writing import Kind, Naming, OfTarget, unlike
from specjax.heads.namings.newest_state_files import MEDUSA_FILES, PREFIX
from specjax.models.base import Json


def _published_medusa(config: MedusaConfig, target: OfTarget) -> Json:
    return {
        "medusa_num_heads": config.most_drafts,
        "medusa_num_layers": config.num_blocks,
        "base_model_name_or_path": target.name,
        "hidden_size": config.target_hidden_size,
        "vocab_size": config.target_vocab_size,
    }


def _medusa_of_vllm(config: MedusaConfig, target: OfTarget) -> Json:
    del target
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "num_heads": config.most_drafts,
        "num_hidden_layers": config.num_blocks,
        "hidden_size": config.target_hidden_size,
        "vocab_size": config.target_vocab_size,
        "truncated_vocab_size": None,
        "medusa_fc_bias": config.has_bias,
        "original_lm_head": False,
    }


MEDUSA = Kind(
    "medusa",
    "Medusa",
    {
        "medusa": Naming(
            # Blocks have biases there. Without matrices of their own, heads are those of the first
            # release.
            lambda config, target: unlike(
                config, has_bias=True, shares_head=False, own_vocab_size=None
            ),
            _published_medusa,
            functools.partial(medusa.weights_of, naming=PUBLISHED),
            (),
            weights_file=MEDUSA_FILES[0],
        ),
        "vllm": Naming(
            lambda config, target: unlike(
                config, has_head=True, shares_head=False, own_vocab_size=None
            ),
            _medusa_of_vllm,
            functools.partial(medusa.weights_of, naming=OF_VLLM),
            ("vLLM before 0.33",),
        ),
    },
)


def _mlp_speculator(config: MlpSpeculatorConfig, target: OfTarget) -> Json:
    del target
    count = config.most_drafts
    return {
        "model_type": "mlp_speculator",
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "vocab_size": config.target_vocab_size,
        "emb_dim": config.target_hidden_size,
        "inner_dim": config.inner_size,
        "n_predict": count,
        "scale_input": config.scale_input,
        "tie_weights": config.is_tied,
        # A tree that its servers may draft: the likeliest tokens of each place, and paths.
        "top_k_tokens_per_head": [max(5 - place, 1) for place in range(count)],
        "n_candidates": 5,
    }


MLP_SPECULATOR = Kind(
    "mlp_speculator",
    "MLP speculator",
    {
        "ibm": Naming(
            lambda config, target: [],
            _mlp_speculator,
            functools.partial(mlp_speculator.weights_of, prefix=PREFIX),
            ("vLLM before 0.33",),
        )
    },
)
