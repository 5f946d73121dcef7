"""SpecjaxRollout: a sampler for tunix's GRPO trainer, in place of its own.

prompts -> token ids -> specjax.rollout under the trainer's weights -> RolloutOutput
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import specjax
from specjax.api.requests import derive_seed
from specjax.api.sizing import power_of_two
from specjax.config.engine import EngineConfig
from specjax.config.keywords import made
from specjax.config.sampling import SamplingParams
from specjax.config.speculation import SpeculationConfig
from specjax.heads.loading import LoadedDrafter
from specjax.integrations import tunix_weights
from specjax.integrations.tunix_sampler import EngineSampler
from specjax.integrations.tunix_weights import as_model as as_model
from specjax.models.base import Model, Params
from specjax.models.sharding import DATA, TENSOR
from specjax.rl.batch import STOP, Rollout
from specjax.rl.beginning import PromptSeeds
from specjax.rl.decoder import RolloutDecoder
from specjax.types import DecoderParams

try:
    from tunix.generate import tokenizer_adapter  # pyright: ignore[reportMissingImports]
    from tunix.rl import common  # pyright: ignore[reportMissingImports]
    from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(
        "specjax.integrations.tunix needs google-tunix: pip install google-tunix."
    ) from error

_TUNIX_TENSOR = "tp"  # the axis of tunix's meshes that heads are split over


class SpecjaxRollout(base_rollout.BaseRollout):
    """A rollout engine for tunix: ClusterConfig(rollout_engine=SpecjaxRollout).

    Options are set by functools.partial(SpecjaxRollout, drafter=...). Drafts change only the
    speed, no sample. docs/tunix.md compares it with tunix's own ("vanilla") engine.

    tunix makes one instance. Calls of `generate` from several threads, as agentic learners make
    them, share steps while the weights are the same.
    """

    def __init__(
        self,
        *,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: Mesh | None,
        rollout_config: base_rollout.RolloutConfig,
        drafter: LoadedDrafter | Model | str | os.PathLike[str] | None = "history",
        draft_params: Params | None = None,
        verification: str | None = None,
        num_speculative_tokens: int | None = None,
        speculative_config: SpeculationConfig | Mapping[str, Any] | str | None = None,
        engine: EngineConfig | Mapping[str, Any] | None = None,
        shares_weights: bool | None = None,
        keeps_eos: bool = False,
        lora_alpha: float | None = None,
        rope_theta: float | None = None,
    ):
        """Makes a rollout engine; tunix passes the first four arguments.

        Args:
          rollout_actor: the policy, Qwen2, Qwen3 or Llama3; tunix passes the model that it trains.
          mesh: devices to sample on: axis "tp" splits heads, all others rows.
          rollout_config: the one of training, for the temperature of get_per_token_logps and
            the tokens of a row.
          drafter, verification, num_speculative_tokens, speculative_config: as for
            `specjax.build_decoder`. `as_model` converts a tunix model to a draft model.
          draft_params: newer weights of a draft model; the attribute of this name may be set
            at any time.
          engine: rows, pages, numerics. Its max_context is the most tokens of prompt and
            completion; None: the limit of rollout_config.
          shares_weights: True: every generate reads the current weights of rollout_actor, and
            tunix synchronises nothing. False: generate uses the weights of the last
            update_params, which tunix calls after every global step. None: True if
            rollout_actor is on this mesh.
          keeps_eos: whether completions include the end-of-sequence token, as in tunix's vLLM
            engine; tunix's own engine strips it.
          lora_alpha: scale of the policy's low-rank adapters, which are merged before sampling.
            None: that of qwix's rules, by which the policy computes.
          rope_theta: of rotations; None: that of tunix's forward, which reads the config's for
            Qwen2 alone.

        Raises:
          NotImplementedError: a family other than Qwen2, Qwen3 and Llama3, or experts.
          ValueError: a setting is invalid, or the scale of adapters is not known.
        """
        if not isinstance(tokenizer, tokenizer_adapter.TokenizerAdapter):
            tokenizer = tokenizer_adapter.TokenizerAdapter(tokenizer)
        self._actor, self._tokenizer, self._mesh = rollout_actor, tokenizer, mesh
        self._keeps_eos = keeps_eos
        self._temperature = _temperature(rollout_config)
        engine = _with_context(made(EngineConfig, engine, "engine"), rollout_config)
        assert engine.max_context is not None
        self._max_context = engine.max_context
        config = tunix_weights.config_of(
            getattr(rollout_actor, "config", None),
            max_position_embeddings=engine.max_context,
            rope_theta=rope_theta,
        )
        dtype = rollout_config.data_type or tunix_weights.dtype_of(rollout_actor)
        if lora_alpha is None:
            lora_alpha = tunix_weights.alpha_of(rollout_actor)
        self._convert = tunix_weights.Converter(config, dtype, lora_alpha)
        # Says now what is wrong with the weights, without computing anything.
        arrays = tunix_weights.arrays_of(rollout_actor)
        jax.eval_shape(
            lambda given: tunix_weights.convert(given, config, dtype, lora_alpha),
            {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()},
        )
        if shares_weights is None:
            shares_weights = _lies_on(arrays.values(), mesh)
        self._read = tunix_weights.Reader(rollout_actor)
        # tunix's arrays, by name, where they are not read from the actor.
        self._snapshot = None if shares_weights else self._placed(arrays)
        self._decoder = specjax.build_decoder(
            config,
            drafter=drafter,
            verification=verification,
            num_speculative_tokens=num_speculative_tokens,
            speculative_config=speculative_config,
            engine=engine,
            mesh=_own_mesh(mesh),
            dtype=dtype,
            shares_steps=True,
        )
        self.draft_params = draft_params
        self.metrics: dict[str, Any] = {}  # of the last generate, see docs/rollouts.md
        self._seeds: dict[int, PromptSeeds] = {}  # of these weights, by the seed of a config
        self._num_seeded = 0  # conversions of weights when _seeds began
        self._lock = threading.Lock()
        # Under the name that tunix's own engines have it, for scripts that evaluate with it.
        self._sampler = EngineSampler(self, rollout_actor, tokenizer, rollout_config)

    @property
    def decoder(self) -> RolloutDecoder:
        """The decoder that it runs: num_traces, drafter, num_speculative_tokens."""
        return self._decoder

    @property
    def num_conversions(self) -> int:
        """How often weights were converted to specjax's layout: once per new weights."""
        return self._convert.num_conversions

    def generate(
        self,
        prompts: Sequence[str] | str,
        rollout_config: base_rollout.RolloutConfig,
        **kwargs: Any,
    ) -> base_rollout.RolloutOutput:
        """Samples one completion of every prompt; repeated prompts get different ones.

        A prompt's noise is derived from rollout_config.seed (None: 0), how often weights have
        changed, the prompt, and how often it was sampled from these weights. So a training run
        that is repeated gets the same samples, in whatever order threads call.

        Args:
          prompts: texts, or one text, as agentic learners pass it.

        Returns:
          text and tokens without the end-of-sequence token (see keeps_eos); prompts padded
          on the left to max_prompt_length, or to the next power of two where one is longer;
          if rollout_config.return_logprobs, log-probabilities of the logits over the
          temperature alone.

        Raises:
          ValueError: nothing to sample from, or prompt and completion exceed what a row
            holds; as `specjax.rollout` raises for NaN weights and settings.
        """
        given = [name for name, value in kwargs.items() if value is not None]
        if given:
            raise NotImplementedError(f"generate does not take {', '.join(given)}.")
        given_texts = [prompts] if isinstance(prompts, str) else prompts
        with self._lock:
            rows = [self._sampler.tokenize(str(prompt)) for prompt in given_texts]
            self._check(rows, rollout_config)
            # A pad token inside a prompt is masked by tunix's own sampler and trainer.
            pad = self.pad_id()
            texts = [[token for token in row if token != pad] for row in rows]
            sampling, params = self._sampling(rollout_config), self._params()
            seeds = [self._prompt_seeds(rollout_config).next(text) for text in texts]
        batch = specjax.rollout(self._decoder, params, texts, sampling=sampling, seeds=seeds)
        with self._lock:
            self.metrics = batch.metrics
            return self._output(batch, rows, rollout_config)

    def get_per_token_logps(
        self,
        prompt_tokens: Array,
        completion_tokens: Array,
        completion_mask: Array | None = None,
    ) -> Array:
        """Returns the log-probabilities of given completions, by tunix's own forward.

        Logits are divided by the temperature, as in `generate` and in the trainer.

        Args:
          completion_mask: not used, as in tunix 0.1.7; earlier versions pass it.

        Returns:
          f32[rows, completion width], with values at padding too.
        """
        del completion_mask
        with self._lock:
            graphdef, state = nnx.split(self._actor)
            if self._snapshot is not None:
                state = _with_arrays(state, self._snapshot)
        return common.compute_per_token_logps(
            graphdef,
            state,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            pad_id=self.pad_id(),
            eos_id=self.eos_id(),
            stop_gradient=True,
            return_logits=False,
            temperature=self._temperature,
        )

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Sets the weights to sample from: all of them, or only adapters.

        Weights on this mesh are neither copied nor donated.

        Raises:
          ValueError: no weights, unknown ones, or, if weights are shared, arrays that are not
            the actor's own.
        """
        del filter_types
        # On a CPU tunix forbids transfers around this call, and conversion makes some.
        with jax.transfer_guard("allow"), self._lock:
            arrays = tunix_weights.arrays_of(params)
            if not arrays:
                raise ValueError(
                    "update_params was given no weights. With offload_to_cpu tunix passes "
                    "those of model(), which is None unless shares_weights=True."
                )
            if self._snapshot is None:
                self._check_shared(arrays)
            else:
                unknown = sorted(set(arrays) - set(self._snapshot))
                if unknown:
                    raise ValueError(
                        f"update_params was given {unknown[:3]}, which the rollout's model "
                        "does not have."
                    )
                self._snapshot = {**self._snapshot, **self._placed(arrays)}

    def pad_id(self) -> int:
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        return self._tokenizer.eos_id()

    def model(self) -> nnx.Module | None:
        """Returns the trained model if weights are shared, so that tunix does not copy them."""
        return self._actor if self._snapshot is None else None

    # Weights

    def _params(self) -> Params | DecoderParams:
        """Returns the weights to sample from, converted if they are new."""
        arrays = self._read() if self._snapshot is None else self._snapshot
        params = self._convert(arrays)
        if self.draft_params is None:
            return params
        return DecoderParams(params, self.draft_params)

    def _placed(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Returns weights on the rollout mesh, with the same partition specs."""
        mesh = self._mesh
        if mesh is None or _lies_on(arrays.values(), mesh):
            return dict(arrays)

        def place(array: Any) -> Array:
            spec = getattr(getattr(array, "sharding", None), "spec", PartitionSpec())
            return jax.device_put(array, NamedSharding(mesh, spec))

        return {name: place(array) for name, array in arrays.items()}

    def _check_shared(self, arrays: Mapping[str, Any]) -> None:
        """Raises ValueError for weights that are not those of the actor."""
        own = tunix_weights.arrays_of(self._actor)
        if any(own.get(name) is not array for name, array in arrays.items()):
            raise ValueError(
                "update_params was given other weights than the trained model's, which this "
                "rollout shares; pass shares_weights=False."
            )

    # Conversions from and to tunix's types

    def _check(self, rows: Sequence[list[int]], config: base_rollout.RolloutConfig) -> None:
        """Raises ValueError for prompts that cannot all be served."""
        if not rows:
            raise ValueError("no prompts were given.")
        pad = self.pad_id()
        for index, row in enumerate(rows):
            if all(token == pad for token in row):
                raise ValueError(
                    f"prompt {index} has no tokens but padding; give it some text, or the "
                    "tokenizer a bos token."
                )
        longest = max(map(len, rows))
        most = longest + config.max_tokens_to_generate
        if most > self._max_context:
            raise ValueError(
                f"a prompt of {longest} tokens and {config.max_tokens_to_generate} to "
                f"generate exceed the {self._max_context} that a row holds; raise "
                "kv_cache_size of the training RolloutConfig, or "
                "engine=EngineConfig(max_context=...)."
            )

    def _stop_token_ids(self, config: base_rollout.RolloutConfig) -> list[int]:
        return [int(token) for token in config.eos_tokens or [self.eos_id()]]

    def _sampling(self, config: base_rollout.RolloutConfig) -> SamplingParams:
        """Returns specjax's sampling parameters for a call."""
        stops, pad = self._stop_token_ids(config), self.pad_id()
        # The trainer treats every pad id as padding. If pad is eos, it ends the text.
        vocab_size = self._decoder.config.vocab_size
        forbids_pad = pad not in stops and 0 <= pad < vocab_size
        return SamplingParams(
            temperature=_temperature(config),
            top_p=1.0 if config.top_p is None else float(config.top_p),
            top_k=max(config.top_k or 0, 0),
            max_tokens=config.max_tokens_to_generate,
            stop_token_ids=stops,
            bad_token_ids=(pad,) if forbids_pad else (),
        )

    def _prompt_seeds(self, config: base_rollout.RolloutConfig) -> PromptSeeds:
        """Returns the seeds of prompts that are sampled from the present weights."""
        if self._num_seeded != self.num_conversions:
            self._seeds, self._num_seeded = {}, self.num_conversions
        seed = derive_seed(_number(config.seed), self.num_conversions)
        return self._seeds.setdefault(seed, PromptSeeds(seed))

    def _output(
        self,
        batch: Rollout,
        rows: Sequence[list[int]],
        config: base_rollout.RolloutConfig,
    ) -> base_rollout.RolloutOutput:
        """Returns the samples in tunix's format."""
        ids, scores, lengths, reasons = map(
            np.asarray,
            (
                batch.completion_ids,
                batch.logprobs.tempered,
                batch.lengths,
                batch.finish_reasons,
            ),
        )
        texts_end = lengths - (reasons == STOP)
        ends = lengths if self._keeps_eos else texts_end
        longest, width = max(map(len, rows)), config.max_prompt_length or 0
        prompts = np.full(
            (len(rows), width if longest <= width else power_of_two(longest)),
            self.pad_id(),
            np.int32,
        )
        for index, row in enumerate(rows):
            prompts[index, prompts.shape[1] - len(row) :] = row
        logprobs = [row[:end] for row, end in zip(scores, ends)]
        return base_rollout.RolloutOutput(
            text=[self._tokenizer.decode(row[:end].tolist()) for row, end in zip(ids, texts_end)],
            logits=[],  # as in tunix's own engine when logits are not requested
            tokens=[row[:end] for row, end in zip(ids, ends)],
            left_padded_prompt_tokens=prompts,
            logprobs=logprobs if config.return_logprobs else None,
        )


def _temperature(config: base_rollout.RolloutConfig) -> float:
    """Returns the temperature of a config; 0 where top_p is None, which is greedy in tunix."""
    return 0.0 if config.top_p is None else float(config.temperature)


def _with_context(engine: EngineConfig, config: base_rollout.RolloutConfig) -> EngineConfig:
    """Returns the engine's config with rows long enough for a RolloutConfig."""
    asked = config.max_prompt_length + config.max_tokens_to_generate
    context = engine.max_context or max(config.kv_cache_size, asked)
    return dataclasses.replace(engine, max_context=context)


def _number(seed: Any) -> int:
    """Returns a whole number from 0 to below 2**64 from a seed: None, an int, or a key of jax."""
    if seed is None:
        return 0
    if isinstance(seed, jax.Array) and jax.dtypes.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    words = np.asarray(seed)
    if words.ndim == 0:
        return int(words) % 2**64
    return int.from_bytes(words.tobytes(), "little") % 2**64


def _own_mesh(mesh: Mesh | None) -> Mesh | None:
    """Returns specjax's mesh over the devices of a tunix one; None for the default device."""
    if mesh is None or [*mesh.devices.flat] == jax.devices()[:1]:
        return None
    devices, shards = mesh.devices, mesh.shape.get(_TUNIX_TENSOR, 1)
    if _TUNIX_TENSOR in mesh.axis_names:
        devices = np.moveaxis(devices, mesh.axis_names.index(_TUNIX_TENSOR), -1)
    return Mesh(devices.reshape(-1, shards), (DATA, TENSOR))


def _lies_on(arrays: Any, mesh: Mesh | None) -> bool:
    """Returns whether all arrays are on a mesh, sharded over it or on its only device."""
    if mesh is None:
        return True
    for array in arrays:
        sharding = getattr(array, "sharding", None)
        if isinstance(sharding, NamedSharding):
            if sharding.mesh != mesh:
                return False
        elif sharding is None or sharding.device_set != {*mesh.devices.flat}:
            return False
    return True


def _with_arrays(state: Any, arrays: Mapping[str, Any]) -> Any:
    """Returns a copy of an nnx state with the named weights replaced."""
    flat = [
        (path, variable.replace(arrays.get(name, variable.get_value())))
        for path, variable in nnx.to_flat_state(state)
        for name in [".".join(map(str, path))]
    ]
    return nnx.from_flat_state(flat)
