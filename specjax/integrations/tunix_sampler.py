"""A rollout engine in the form of tunix's samplers, which its scripts evaluate a policy with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from flax import nnx

try:
    from tunix.generate import base_sampler  # pyright: ignore[reportMissingImports]
    from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(
        "specjax.integrations.tunix needs google-tunix: pip install google-tunix."
    ) from error


class EngineSampler(base_sampler.BaseSampler):
    """Calls a rollout engine as tunix's samplers are called.

    All engines of tunix have one as `_sampler`, and scripts that evaluate the policy after
    training take it from there.
    """

    def __init__(
        self,
        rollout: base_rollout.BaseRollout,
        actor: nnx.Module,
        tokenizer: Any,
        rollout_config: base_rollout.RolloutConfig,
    ):
        """Takes an engine, its policy, an adapted tokenizer and the RolloutConfig of training."""
        self._rollout, self._actor, self._config = rollout, actor, rollout_config
        self.tokenizer = tokenizer

    def __call__(
        self,
        input_strings: str | Sequence[str],
        max_generation_steps: int,
        max_prompt_length: int | None = None,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        beam_size: int | None = None,
        seed: Any = None,
        multi_sampling: int = 1,
        return_logits: bool = False,
        echo: bool = False,
        pad_output: bool = False,
        *,
        eos_tokens: Sequence[int] | None = None,
        return_logprobs: bool = False,
        **others: Any,
    ) -> base_sampler.SamplerOutput:
        """Samples a completion of each text from the current weights.

        Args:
          temperature, top_p, top_k, seed: as in a RolloutConfig; top_p=None is greedy.
          return_logits: not used; the output has none.

        Raises:
          NotImplementedError: beams, several samples, the prompt in the output, padding, or an
            argument that only other samplers have.
          ValueError: as `SpecjaxRollout.generate`.
        """
        del return_logits
        others |= {"beam_size": beam_size, "echo": echo or None, "pad_output": pad_output or None}
        others["multi_sampling"] = None if multi_sampling == 1 else multi_sampling
        given = [name for name, value in others.items() if value is not None]
        if given:
            raise NotImplementedError(f"the sampler does not take {', '.join(sorted(given))}.")
        config = dataclasses.replace(
            self._config,
            max_tokens_to_generate=max_generation_steps,
            max_prompt_length=max_prompt_length or 0,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            eos_tokens=list(eos_tokens) if eos_tokens else self._config.eos_tokens,
            return_logprobs=return_logprobs,
        )
        texts = [input_strings] if isinstance(input_strings, str) else list(input_strings)
        output = self._rollout.generate(texts, config)
        return base_sampler.SamplerOutput(
            text=output.text,
            logits=output.logits,
            tokens=output.tokens,
            padded_prompt_tokens=output.left_padded_prompt_tokens,
            logprobs=output.logprobs,
        )

    @property
    def transformer(self) -> nnx.Module:
        return self._actor

    @property
    def transformer_state(self) -> Any:
        return nnx.variables(self._actor, nnx.Param)

    def tokenize(self, input_string: str) -> list[int]:
        """Returns token ids, with exactly one bos token at the start if there is one."""
        bos = self.tokenizer.bos_id()
        ids = [*([bos] if bos else []), *self.tokenizer.encode(input_string)]
        return list(map(int, self.tokenizer.dedup_bos_ids(ids)))
