"""Makes the golden checkpoints beside it: tiny random models and their logits.

    pip install -e '.[reference]' && python tests/goldens/make_goldens.py [name ...]

Each folder holds config.json and model.safetensors as transformers writes them,
and reference.npz with ids i32[2, 17] and logits f32[2, 17, vocab] of its eager
float32 forward pass. Weights are wide (std 0.15, norms around one, biases not
zero), so that a wrong window, scale or rotation shows in the logits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

GOLDENS = Path(__file__).resolve().parent
VOCAB_SIZE = 99
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}
SKELETON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def configs() -> dict[str, transformers.PretrainedConfig]:
    """Returns a config per golden: each family, each option that changes logits."""
    plain = {"rope_type": "default", "rope_theta": 1000.0}
    linear = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
    llama, qwen2, qwen3, mistral, granite = (
        lambda family=family, **options: getattr(transformers, f"{family}Config")(
            **{**SKELETON, "rope_parameters": plain, **options}
        )
        for family in ("Llama", "Qwen2", "Qwen3", "Mistral", "Granite")
    )
    return {
        "llama": llama(rope_parameters=LLAMA3_ROPE, attention_bias=True, mlp_bias=True),
        "llama_tied": llama(rope_parameters=linear, head_dim=16, tie_word_embeddings=True),
        "llama_yarn": llama(rope_parameters=YARN_ROPE, num_key_value_heads=4),
        "qwen2": qwen2(tie_word_embeddings=True),
        "qwen2_sliding": qwen2(use_sliding_window=True, sliding_window=5, max_window_layers=1),
        "qwen3": qwen3(head_dim=16),
        "mistral": mistral(sliding_window=6),
        "granite": granite(
            embedding_multiplier=3.0,
            attention_multiplier=0.2,
            residual_multiplier=0.6,
            logits_scaling=2.0,
            tie_word_embeddings=True,
        ),
        "gpt2": transformers.GPT2Config(
            vocab_size=VOCAB_SIZE,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            bos_token_id=1,
            eos_token_id=2,
        ),
        "gpt_bigcode": transformers.GPTBigCodeConfig(
            vocab_size=VOCAB_SIZE,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_inner=48,
            n_positions=64,
            bos_token_id=1,
            eos_token_id=2,
        ),
    }


def make(name: str, config: transformers.PretrainedConfig, seed: int) -> None:
    """Writes one golden folder."""
    generator = torch.Generator().manual_seed(seed)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    model = model.to(torch.float32).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            is_norm = weight.ndim == 1 and key.endswith("weight")
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * noise if is_norm else 0.15 * noise)
        shape = (2, 17)
        ids = torch.randint(0, VOCAB_SIZE, shape, generator=generator)
        logits = model(ids, use_cache=False).logits
    folder = GOLDENS / name
    model.save_pretrained(folder)
    generation = {"eos_token_id": [2, 5], "temperature": 0.7, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation) + "\n")
    np.savez_compressed(
        folder / "reference.npz",
        ids=ids.numpy().astype(np.int32),
        logits=logits.numpy().astype(np.float32),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    names = sys.argv[1:]  # by default all
    for seed, (name, config) in enumerate(configs().items()):
        if not names or name in names:
            make(name, config, seed)
