"""A program that uses specjax under whatever settings of jax the environment has.

Run by test_other_programs.py in a process of its own: settings are read as jax starts.
Prints one line of JSON, what each part gave or the error that it raised.
"""

import json
import sys
import traceback

import numpy as np

import specjax

PROMPT = "def f("
GREEDY = specjax.SamplingParams(temperature=0, max_tokens=8)
SAMPLED = specjax.SamplingParams(temperature=0.8, top_p=0.9, max_tokens=8, seed=3, logprobs=2)
# Of sizes that all parts share, so that steps are compiled once.
ENGINE = specjax.EngineConfig(
    max_rows=2, page_size=16, num_pages=32, max_context=256, burst_steps=4
)


def main():
    target = specjax.load_model("demo")
    arguments = {
        "drafter": specjax.load_drafter("demo", target),
        "num_speculative_tokens": 2,
        "speculative_config": {"policy": "fixed"},
        "engine": ENGINE,
    }

    def generate():
        sampling = [GREEDY, SAMPLED]
        out = specjax.generate(target, [PROMPT] * 2, sampling=sampling, **arguments)
        assert out.stats.acceptance.num_accepted > 0
        return [completion.token_ids for completion in out]

    def engine():
        told = {}
        with specjax.Engine(target, **arguments) as running:
            for sampling in (GREEDY, SAMPLED):
                told[running.add(PROMPT, sampling)] = []
            while running.has_work:
                for chunk in running.step():
                    told[chunk.prompt_index] += chunk.token_ids
        return list(told.values())

    def rollout():
        decoder = specjax.build_decoder(target, **arguments)
        sampling = specjax.SamplingParams(max_tokens=8, seed=1)
        batch = specjax.rollout(decoder, target.params, [PROMPT], num_samples=2, sampling=sampling)
        behaviour = np.asarray(batch.logprobs.behaviour)
        assert behaviour.dtype == np.float32, behaviour.dtype
        assert batch.acceptance_rates.dtype == np.float32
        if "--score" in sys.argv:
            scored = specjax.score(decoder, target.params, batch)
            np.testing.assert_allclose(scored.behaviour, behaviour, atol=1e-3)
        gap = specjax.logprob_gap(behaviour, behaviour, batch.completion_mask)
        assert {value.dtype.name for value in gap.values()} == {"float32"}
        return np.asarray(batch.token_ids).tolist()

    answers = {}
    for part in (generate, engine, rollout):
        try:
            answers[part.__name__] = part()
        except Exception as error:
            traceback.print_exc()
            answers[part.__name__] = f"{type(error).__name__}: {error}"
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
