"""Keys of config.json and generation_config.json that say something, and that nothing reads."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from specjax.models.base import Json

# Of a config.json: names, training, what transformers returns, and how it computes.
_IDLE_NAMES = """
    _name_or_path architectures auto_map base_model_name dtype finetuning_task
    is_llama_config keys_to_ignore_at_inference language license model_name model_type name_or_path
    tags tokenizer_class torch_dtype transformers.js_config transformers_version unsloth_fixed
    unsloth_version
    chunk_size_feed_forward gradient_checkpointing id2label initializer_range is_decoder label2id
    num_labels output_attentions output_hidden_states output_router_logits pretraining_tp
    problem_type return_dict summary_activation summary_proj_to_labels summary_type
    summary_use_proj task_specific_params tie_encoder_decoder torchscript use_bfloat16 use_cache
    attn_implementation attention_softmax_in_fp32 cache_implementation inference_runner
    max_batch_size pad_key_length pre_allocate_kv_cache reorder_and_upcast_attn
    runner_max_sequence_length scale_attention_softmax_in_fp32 use_flash_attention
    validate_runner_input
    bos_token_id cls_token_id decoder_start_token_id pad_token_id sep_token_id unk_token_id
    compression_config quantization_config num_nextn_predict_layers
"""
_IDLE = frozenset(_IDLE_NAMES.split())
# Of a generation_config.json, beside those of config.json. max_length is compared by its readers.
_IDLE_IN_GENERATION = frozenset(("return_dict_in_generate", "output_scores", "output_logits"))
# Values that change no text: transformers wrote them into every config.json once. Of a key that
# switches something on, false; of others a number.
_OFF = """
    add_cross_attention disable_compile do_sample early_stopping is_assistant is_encoder_decoder
    load_in_4bit load_in_8bit low_cpu_mem_usage low_memory output_logits output_past output_scores
    remove_invalid_values renormalize_logits return_dict_in_generate return_legacy_cache
    rope_interleaved tf_legacy_loss token_healing trust_remote_code use_mrope
"""
_NEUTRAL: Json = dict.fromkeys(_OFF.split(), False) | {
    "diversity_penalty": 0.0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "guidance_scale": 1.0,
    "length_penalty": 1.0,
    "max_length": 20,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "penalty_alpha": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "typical_p": 1.0,
}


class Reading(dict):
    """A config.json that remembers which of its keys were asked for.

    Who copies it is taken to read all of it.
    """

    def __init__(self, raw: Json, asked: set[str] | None = None):
        super().__init__(raw)
        self.asked: set[str] = set() if asked is None else asked

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __or__(self, more: Any) -> Reading:
        return Reading(dict(dict.items(self)) | more, self.asked)

    def __iter__(self) -> Iterator[str]:
        self.asked.update(dict.keys(self))
        return super().__iter__()

    def keys(self) -> Any:
        self.asked.update(dict.keys(self))
        return super().keys()

    def items(self) -> Any:
        self.asked.update(dict.keys(self))
        return super().items()


def unread(raw: Json, asked: Collection[str]) -> list[str]:
    """Returns the keys of a config.json that say something and were not asked for."""
    return _saying(raw, {*asked, *_IDLE})


def unread_in_generation(raw: Json, known: Collection[str], context: int) -> list[str]:
    """Returns the keys of a generation_config.json that would change texts and are not read.

    Args:
      known: keys that are read.
      context: most tokens of a text, so that a max_length of no less says nothing.
    """
    found = _saying(raw, {*known, *_IDLE, *_IDLE_IN_GENERATION})
    length = raw.get("max_length")
    is_idle = isinstance(length, int) and length >= context
    return [key for key in found if key != "max_length" or not is_idle]


def _saying(raw: Json, but: Collection[str]) -> list[str]:
    return [
        key
        for key, value in dict.items(raw)
        # An empty value says nothing. false and 0 may switch off what a model has. Shares of
        # dropout are of training.
        if key not in but
        and "drop" not in key
        and value not in (None, "", [], {})
        and not key.startswith("_")
        and value != _NEUTRAL.get(key)
    ]
