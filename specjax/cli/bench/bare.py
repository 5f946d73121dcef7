"""Runs only the unavoidable work of a step, as the yardstick of the benchmark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from specjax.decode.state import DecodeState
from specjax.models.base import ModelConfig, Params
from specjax.models.families import family_of
from specjax.models.layers import linear
from specjax.paged.forward import forward, make_batch
from specjax.sampling import first_argmax


def matmul_bytes(params: Params) -> int:
    """Returns the bytes of weights that one step reads: all but the embedding tables."""
    tables = [params[name].nbytes for name in ("embed_tokens", "embed_positions") if name in params]
    if "lm_head" not in params:
        tables = tables[1:]  # a tied embedding is read whole, as the head
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - sum(tables)


def matmul_chain(
    params: Params,
    num_tokens: int,
    num_steps: int,
    form: Literal["plain", "linear"] = "plain",
) -> Callable[[], Any]:
    """Returns a function that runs the matmuls of num_steps steps, and nothing else.

    The products are chained so that none can be skipped: each layer's input depends
    on its last output. num_tokens rows of activations.

    Args:
      params: of a Llama with an untied head and no biases.
      form: "plain" is `x @ weight` with copies of the weights as [in, out], made here;
        "linear" is the function that the models call.
    """
    matrices = {
        "layers": [
            {name: leaf for name, leaf in layer.items() if name.endswith("_proj")}
            for layer in params["layers"]
        ],
        "lm_head": params["lm_head"],
    }
    if form == "plain":
        matrices = jax.tree.map(lambda weight: jnp.array(weight.T), matrices)
    product = {"plain": jnp.matmul, "linear": linear}[form]

    def one_step(matrices: Params, x):
        for layer in matrices["layers"]:
            q, k, v = (product(x, layer[name]) for name in ("q_proj", "k_proj", "v_proj"))
            x = product(q + jnp.sum(k + v) * 1e-6, layer["o_proj"])
            gated = product(x, layer["gate_proj"]) * product(x, layer["up_proj"])
            x = product(gated, layer["down_proj"])
        out = product(x, matrices["lm_head"])
        return x + jnp.max(out, axis=1, keepdims=True) * 1e-6

    def run(matrices: Params, x):
        return jax.lax.fori_loop(0, num_steps, lambda _, x: one_step(matrices, x), x)

    hidden_size = params["embed_tokens"].shape[1]
    compiled = jax.jit(run)
    x = jnp.full((num_tokens, hidden_size), 1e-3)
    return lambda: compiled(matrices, x)


def forward_loop(
    params: Params, config: ModelConfig, state: DecodeState, num_steps: int
) -> Callable[[], Any]:
    """Returns a function that runs greedy decoding with nothing but the model.

    The flat forward over the same pages, an argmax, and the token fed back: no
    sampling parameters, stop rules, acceptance, report or host.
    """
    architecture = family_of(config)
    rows = state.rows
    page_size, num_slots = state.cache.page_size, state.cache.num_slots

    def run(params, pages, block_table, lengths, history):
        def body(_, carry):
            pages, lengths, history = carry
            batch = make_batch(
                history,
                block_table,
                lengths,
                jnp.ones(rows, jnp.int32),
                num_tokens=rows,
                page_size=page_size,
                num_slots=num_slots,
            )
            hidden, pages = forward(params, config, pages, batch, max_tokens_per_row=1)
            # One reader: no layout need be kept for others, as `decode.forward.logits` does.
            token, _ = first_argmax(architecture.logits(params, config, hidden))
            history = history.at[jnp.arange(rows), lengths + 1].set(token, mode="drop")
            return pages, lengths + 1, history

        return jax.lax.fori_loop(0, num_steps, body, (pages, lengths, history))

    compiled = jax.jit(run, donate_argnums=1)
    pages = jax.tree.map(jnp.copy, state.cache.pages)
    table, lengths, history = map(
        jnp.copy, (state.cache.block_table, state.cache.lengths, state.history)
    )

    def call():
        nonlocal pages
        pages, *rest = compiled(params, pages, table, lengths, history)
        return rest

    return call
