"""Converts configs and weights of tunix's Qwen3 and Llama3 to those of specjax.

nnx state -> arrays by tunix's names -> one jitted transposition -> specjax's tree
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from specjax.models.base import Model, ModelConfig, Params, RopeConfig

try:
    from tunix.models.llama3 import model as llama3  # pyright: ignore[reportMissingImports]
    from tunix.models.qwen3 import model as qwen3  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(
        "specjax.integrations.tunix needs google-tunix: pip install 'specjax[tunix]'."
    ) from error

# Both models of tunix 0.1.7 use theta 1e6: they call apply_rope without
# ModelConfig.rope_theta, and it does not implement Llama 3.1's scaling. The policy is the
# trainer's forward, so specjax samples with the same theta, whatever the config says.
ROPE_THETA = 1e6

# Weights of a layer: specjax's name -> tunix's name.
_OF_LAYER = {
    "input_norm": "input_layernorm.w",
    "q_proj": "attn.q_proj.w",  # [hidden, heads, head_dim]
    "k_proj": "attn.k_proj.w",  # [hidden, kv_heads, head_dim]
    "v_proj": "attn.v_proj.w",  # [hidden, kv_heads, head_dim]
    "o_proj": "attn.o_proj.w",  # [heads, head_dim, hidden]
    "post_attention_norm": "post_attention_layernorm.w",
    "gate_proj": "mlp.gate_proj.kernel",  # [hidden, mlp]
    "up_proj": "mlp.up_proj.kernel",  # [hidden, mlp]
    "down_proj": "mlp.down_proj.kernel",  # [mlp, hidden]
}
_NORMS_OF_HEADS = {"q_norm": "attn.q_norm.w", "k_norm": "attn.k_norm.w"}
_LORA = ("_lora_a", "_lora_b")  # behind the name of what they are added to

Arrays = Mapping[str, Any]  # by tunix's names, "layers.0.attn.q_proj.w"


def config_of(
    config: Any, *, max_position_embeddings: int, rope_theta: float = ROPE_THETA
) -> ModelConfig:
    """Returns specjax's config of a tunix ModelConfig.

    Args:
      max_position_embeddings: most tokens of prompt and completion; tunix has no limit.

    Raises:
      NotImplementedError: of another family, or with experts.
    """
    if isinstance(config, qwen3.ModelConfig):
        if config.num_experts is not None:
            raise NotImplementedError(
                f"{config.num_experts=}: mixtures of experts are not covered; Qwen3 without "
                "experts and Llama3 are."
            )
        family, is_tied = "qwen3", config.use_tied_embedding
    elif isinstance(config, llama3.ModelConfig):
        family, is_tied = "llama", config.weight_tying
    else:
        raise NotImplementedError(
            f"{type(config).__module__}.{type(config).__qualname__} is not covered; "
            "tunix.models.qwen3 without experts and tunix.models.llama3 are."
        )
    return ModelConfig(
        architecture="llama",
        family=family,
        vocab_size=config.vocab_size,
        hidden_size=config.embed_dim,
        intermediate_size=config.hidden_dim,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=max_position_embeddings,
        norm_eps=config.norm_eps,
        rope=RopeConfig(theta=rope_theta),
        tie_word_embeddings=is_tied,
        qk_norm=family == "qwen3",
    )


def arrays_of(state: Any) -> dict[str, Any]:
    """Returns the weights of an nnx model or state by name: its own arrays, no copies.

    Raises:
      NotImplementedError: a weight is no array, as of a quantised model.
    """
    if isinstance(state, nnx.Module):
        state = nnx.state(state, nnx.Param)
    arrays = {}
    for path, variable in nnx.to_flat_state(state):
        value = variable.get_value() if isinstance(variable, nnx.Variable) else variable
        name = ".".join(map(str, path))
        if not hasattr(value, "dtype") or not hasattr(value, "shape"):
            raise NotImplementedError(
                f"weight {name} is a {type(value).__name__} and no array; quantised weights "
                "are not covered."
            )
        arrays[name] = value
    return arrays


def convert(
    arrays: Arrays,
    config: ModelConfig,
    dtype: DTypeLike,
    lora_alpha: float | None = None,
) -> Params:
    """Returns specjax's tree of weights from tunix's; pure, for jit.

    Matrices become [out, in], heads side by side; low-rank adapters are added to what they
    adapt: W + lora_alpha / rank * A @ B.

    Raises:
      ValueError: names are missing or unknown, or adapters come without lora_alpha.
    """
    layout = _layout(config)
    _check_names(arrays, jax.tree.leaves(layout), lora_alpha)

    def of(path: Any, name: str) -> Array:
        weight = _merged(arrays, name, lora_alpha)
        return _matrix(path[-1].key, weight).astype(dtype)

    return jax.tree_util.tree_map_with_path(of, layout)


def as_model(
    module: nnx.Module,
    *,
    max_position_embeddings: int,
    rope_theta: float = ROPE_THETA,
    lora_alpha: float | None = None,
) -> Model:
    """Returns a tunix model as specjax's: a draft model, or a target for `specjax.generate`.

    It has copies of the weights, and no tokenizer.
    """
    config = config_of(
        getattr(module, "config", None),
        max_position_embeddings=max_position_embeddings,
        rope_theta=rope_theta,
    )
    arrays = arrays_of(module)
    converter = Converter(config, dtype_of(module), lora_alpha)
    return Model(config, converter(arrays), name=config.family)


def dtype_of(module: nnx.Module) -> Any:
    """Returns the dtype that a tunix model computes in: its config's, else its weights'."""
    dtype = getattr(getattr(module, "config", None), "dtype", None)
    return jnp.dtype(dtype or next(iter(arrays_of(module).values())).dtype)


class Converter:
    """Converts weights, only if the arrays differ from those of the last call.

    It holds weak references to tunix's arrays, so that the trainer can free them.
    """

    def __init__(self, config: ModelConfig, dtype: DTypeLike, lora_alpha: float | None):
        self._convert = jax.jit(
            functools.partial(convert, config=config, dtype=dtype, lora_alpha=lora_alpha)
        )
        self._seen: tuple[weakref.ref[Any], ...] = ()
        self._params: Params | None = None
        self.num_conversions = 0

    def __call__(self, arrays: Arrays) -> Params:
        """Returns specjax's tree; raises ValueError as `convert` does."""
        if self._params is not None and self._is_last(arrays):
            return self._params
        self._params = None  # frees the last ones first
        _check_alive(arrays)
        params = self._params = self._convert(dict(arrays))
        self._seen = tuple(weakref.ref(array) for array in arrays.values())
        self.num_conversions += 1
        return params

    def _is_last(self, arrays: Arrays) -> bool:
        # Numpy arrays may have changed in place, so they always count as new.
        return len(self._seen) == len(arrays) and all(
            ref() is array and isinstance(array, jax.Array)
            for ref, array in zip(self._seen, arrays.values())
        )


def _layout(config: ModelConfig) -> Params:
    """Returns specjax's tree of weights with tunix's name at each leaf."""
    of_layer = _OF_LAYER | (_NORMS_OF_HEADS if config.qk_norm else {})
    layout: Params = {
        "embed_tokens": "embedder.input_embedding",
        "layers": tuple(
            {ours: f"layers.{index}.{theirs}" for ours, theirs in of_layer.items()}
            for index in range(config.num_layers)
        ),
        "norm": "final_norm.w",
    }
    if not config.tie_word_embeddings:
        layout["lm_head"] = "lm_head.w"
    return layout


def _matrix(name: str, weight: Array) -> Array:
    """Returns a weight as published, [out, in]; vectors and the embedding as they are."""
    if weight.ndim == 1 or name == "embed_tokens":
        return weight
    if name == "o_proj":
        return weight.reshape(-1, weight.shape[-1]).T
    return weight.reshape(weight.shape[0], -1).T


def _merged(arrays: Arrays, name: str, lora_alpha: float | None) -> Array:
    """Returns a weight with its adapter, if it has one."""
    weight = jnp.asarray(arrays[name])
    if name + _LORA[0] not in arrays:
        return weight
    assert lora_alpha is not None
    a, b = (jnp.asarray(arrays[name + suffix]) for suffix in _LORA)
    rank = a.shape[-1]
    product = jax.lax.dot(
        a.reshape(-1, rank).astype(jnp.float32),
        b.reshape(rank, -1).astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    return weight + lora_alpha / rank * product.reshape(weight.shape)


def _check_names(arrays: Arrays, wanted: list[str], lora_alpha: float | None) -> None:
    """Raises ValueError for missing or unknown weights, or adapters without lora_alpha."""
    adapters = [name for name in arrays if name.endswith(_LORA)]
    if adapters and lora_alpha is None:
        raise ValueError(
            f"the policy has low-rank adapters ({adapters[0]} and {len(adapters) - 1} more), "
            "and their scale is not among the weights; pass lora_alpha, the alpha they are "
            "trained with: functools.partial(SpecjaxRollout, lora_alpha=...)."
        )
    known = {*wanted, *(name + suffix for name in wanted for suffix in _LORA)}
    missing = sorted(set(wanted) - set(arrays))
    unknown = sorted(set(arrays) - known)
    odd = [name for name in adapters if _partner(name) not in arrays]
    if missing or unknown or odd:
        raise ValueError(
            f"these are not the weights of the model that the rollout was made for: missing "
            f"{missing[:3]}, not expected {(unknown + odd)[:3]}."
        )


def _partner(name: str) -> str:
    """Returns the name of the other half of an adapter."""
    a, b = _LORA
    return name[: -len(a)] + (b if name.endswith(a) else a)


def _check_alive(arrays: Arrays) -> None:
    """Raises ValueError where an array was donated."""
    for name, array in arrays.items():
        if isinstance(array, jax.Array) and array.is_deleted():
            raise ValueError(
                f"weight {name} was deleted, as donating it to another function does; pass the "
                "weights that came out of that function."
            )
