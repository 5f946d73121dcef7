"""A rollout as a person sees it: a line of figures, no arrays."""

import dataclasses

import jax
import numpy as np
from jax.sharding import PartitionSpec

from specjax.rl.batch import UNFINISHED, Rollout, RolloutLogProbs

COUNT, PROMPT, WIDTH = 3, 4, 5


def batch(**changes):
    lengths = np.array([5, 3, 1], np.int32)
    mask = np.arange(WIDTH) < lengths[:, None]
    zeros = np.zeros((COUNT, WIDTH), np.float32)
    versions = np.where(np.arange(WIDTH) < 2, 7, 8) * np.ones((COUNT, 1), int)
    counts = np.zeros(COUNT, np.int32)
    fields = dict.fromkeys(("entropy", "top_ids", "top_logprobs"))
    fields |= {
        "prompt_ids": np.zeros((COUNT, PROMPT), np.int32),
        "prompt_mask": np.ones((COUNT, PROMPT), bool),
        "completion_ids": zeros.astype(np.int32),
        "completion_mask": mask,
        "loss_mask": mask,
        "lengths": lengths,
        "finish_reasons": counts + 1,
        "logprobs": RolloutLogProbs(behaviour=zeros, tempered=zeros, raw=zeros),
        "params_versions": versions,
        "num_drafted": counts + 4,
        "num_accepted": counts + 3,
        "num_steps": counts + 1,
        "prompt_index": counts,
        "seeds": np.zeros((COUNT, 2), np.uint32),
        "is_exact": True,
    }
    return Rollout(**fields | changes)


def test_a_rollout_is_a_line_of_figures():
    shape = "Rollout(3 samples, prompts of 4 and completions of 5 tokens, 3.0 on average"
    assert repr(batch()) == f"{shape}, weights 7 to 8, 75% of drafts accepted)"
    nothing = np.zeros(COUNT, np.int32)
    plain = batch(num_drafted=nothing, params_versions=np.full((COUNT, WIDTH), 2))
    assert repr(plain) == f"{shape}, weights 2)"
    cut = dataclasses.replace(plain, finish_reasons=nothing + UNFINISHED, errors={1: "why"})
    assert repr(cut) == f"{shape}, weights 2, 3 unfinished, 1 failed)"
    lossy = dataclasses.replace(plain, is_exact=False)
    assert repr(lossy).endswith("weights 2, not of the policy's own distribution)")


def test_a_rollout_of_no_arrays_is_shown_too():
    specs = jax.tree.map(lambda leaf: PartitionSpec("data"), batch())
    assert repr(specs).startswith("Rollout(of P")
    seen = []
    jax.eval_shape(lambda given: seen.append(repr(given)) or given.lengths, batch())
    assert seen[0].startswith("Rollout(of ")
