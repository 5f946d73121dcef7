"""Converts configs and weights of tunix's Qwen2, Qwen3 and Llama3 to those of specjax.

nnx state -> arrays by tunix's names -> one jitted transposition -> specjax's tree
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from specjax.models import layouts
from specjax.models.base import Model, ModelConfig, Params, RopeConfig
from specjax.models.layouts.converting import convert as converted
from specjax.models.layouts.once import Once

try:
    from tunix.models.llama3 import model as llama3  # pyright: ignore[reportMissingImports]
    from tunix.models.qwen2 import model as qwen2  # pyright: ignore[reportMissingImports]
    from tunix.models.qwen3 import model as qwen3  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(
        "specjax.integrations.tunix needs google-tunix: pip install google-tunix."
    ) from error

# Llama3 and Qwen3 of tunix 0.1.7 use theta 1e6: they call apply_rope without
# ModelConfig.rope_theta, and it does not implement Llama 3.1's scaling. The policy is the
# trainer's forward, so specjax samples with the same theta, whatever the config says. Qwen2
# reads the config's.
ROPE_THETA = 1e6

_LORA = ("_lora_a", "_lora_b")  # behind the name of what they are added to

Arrays = Mapping[str, Any]  # by tunix's names, "layers.0.attn.q_proj.w"


def config_of(
    config: Any, *, max_position_embeddings: int, rope_theta: float | None = None
) -> ModelConfig:
    """Returns specjax's config of a tunix ModelConfig.

    Args:
      max_position_embeddings: most tokens of prompt and completion; tunix has no limit.
      rope_theta: of rotations; None: that of tunix's forward.

    Raises:
      NotImplementedError: of another family, or with experts.
    """
    if isinstance(config, qwen3.ModelConfig):
        if config.num_experts is not None:
            raise NotImplementedError(
                f"{config.num_experts=}: mixtures of experts are not covered; Qwen3 without "
                "experts, Qwen2 and Llama3 are."
            )
        family, is_tied = "qwen3", config.use_tied_embedding
    elif isinstance(config, qwen2.ModelConfig):
        family, is_tied = "qwen2", config.use_tied_embedding
        rope_theta = rope_theta or float(config.rope_theta)
    elif isinstance(config, llama3.ModelConfig):
        family, is_tied = "llama", config.weight_tying
    else:
        raise NotImplementedError(
            f"{type(config).__module__}.{type(config).__qualname__} is not covered; "
            "tunix.models.qwen3 without experts, tunix.models.qwen2 and tunix.models.llama3 are."
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
        rope=RopeConfig(theta=rope_theta or ROPE_THETA),
        tie_word_embeddings=is_tied,
        qk_norm=family == "qwen3",
        qkv_bias=family == "qwen2",
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


class Reader:
    """Reads the weights of a model, of which it remembers the places.

    flax walks a model in some 30 ms where it has 36 layers, and weights are read in each call.
    """

    def __init__(self, module: nnx.Module):
        self._module = module
        self._paths: list[tuple[str, tuple[Any, ...]]] = []
        self._num_attributes = -1  # of the modules that have weights

    def __call__(self) -> dict[str, Any]:
        """Returns what `arrays_of` returns; raises as it does."""
        arrays: dict[str, Any] = {}
        parents: dict[int, Any] = {}
        try:
            for name, (*above, last) in self._paths:
                parent = functools.reduce(_child, above, self._module)
                parents[id(parent)] = parent
                arrays[name] = _child(parent, last).get_value()
        except (AttributeError, LookupError, TypeError):
            return self._walked()
        if self._num_attributes != _num_attributes(parents.values()):
            return self._walked()
        return arrays

    def _walked(self) -> dict[str, Any]:
        """Walks the whole model, and remembers its places."""
        arrays = arrays_of(self._module)
        paths = [path for path, _ in nnx.to_flat_state(nnx.state(self._module, nnx.Param))]
        self._paths = [(".".join(map(str, path)), path) for path in paths]
        parents = [functools.reduce(_child, path[:-1], self._module) for path in paths]
        self._num_attributes = _num_attributes({id(each): each for each in parents}.values())
        return arrays


def _child(node: Any, key: Any) -> Any:
    """Returns a part of a module, a list or a dict, by the key that nnx gives it in a path."""
    return node[key] if isinstance(key, int) else getattr(node, key)


def _num_attributes(modules: Iterable[Any]) -> int:
    """Returns a number that changes where adapters are put beside weights."""
    return sum(len(vars(module)) for module in modules)


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
    layout = layouts.tunix(config)
    wanted = [*layout.expected(config)]
    _check_names(arrays, wanted, lora_alpha)
    merged = {name: _merged(arrays, name, lora_alpha) for name in wanted}
    params = converted(merged, layout, config)
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def as_model(
    module: nnx.Module,
    *,
    max_position_embeddings: int,
    rope_theta: float | None = None,
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


def alpha_of(module: nnx.Module) -> float | None:
    """Returns the alpha of a model's low-rank adapters; None where it is not to be found.

    qwix keeps it in the rules of a provider, which the call of an adapted model has closed over.
    """
    rules = [
        rule
        for provider in _held_by(vars(type(module)).get("__call__"))
        for rule in getattr(provider, "_rules", ())
    ]
    alphas = {rule.alpha for rule in rules if hasattr(rule, "alpha") and hasattr(rule, "rank")}
    return float(alphas.pop()) if len(alphas) == 1 else None


def _held_by(function: Any, depth: int = 4) -> Iterator[Any]:
    """Yields what a function has closed over or bound, and what the functions among it have."""
    if depth == 0:
        return
    if isinstance(function, functools.partial):
        held = [function.func, *function.args, *function.keywords.values()]
    else:
        held = (
            inspect.getclosurevars(function).nonlocals.values()
            if inspect.isfunction(function)
            else ()
        )
    for each in held:
        yield each
        yield from _held_by(each, depth - 1)


def dtype_of(module: nnx.Module) -> Any:
    """Returns the dtype that a tunix model computes in: its config's, else its weights'."""
    dtype = getattr(getattr(module, "config", None), "dtype", None)
    return jnp.dtype(dtype or next(iter(arrays_of(module).values())).dtype)


class Converter:
    """Converts weights, only if the arrays differ from those of the last call.

    It holds weak references to tunix's arrays, so that the trainer can free them.
    """

    def __init__(self, config: ModelConfig, dtype: DTypeLike, lora_alpha: float | None):
        run = jax.jit(functools.partial(convert, config=config, dtype=dtype, lora_alpha=lora_alpha))
        self._once = Once(lambda arrays: run(dict(arrays)))

    @property
    def num_conversions(self) -> int:
        """How often weights were converted."""
        return self._once.num_conversions

    def __call__(self, arrays: Arrays) -> Params:
        """Returns specjax's tree; raises ValueError as `convert` does."""
        return self._once(arrays)


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
            "and neither its weights nor qwix's rules say their scale; pass lora_alpha, the "
            "alpha they are trained with: functools.partial(SpecjaxRollout, lora_alpha=...)."
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
