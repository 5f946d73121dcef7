"""Drafts that branch sample the same tokens, on the embedded pair: any builder, any change between
steps."""

import numpy as np
import pytest
from helpers import AlternatingDrafter, MarginalsDrafter
from lossless import EVERYTHING, hold_against, plain, prompts, target

import specjax
from specjax.config.engine import EngineConfig
from specjax.heads.loading import LoadedDrafter
from specjax.policy.interface import Decision
from specjax.trees import best_static, static_shapes


class RandomDepth:
    """Another K for every burst, plain decoding among them."""

    max_speculative_tokens = 3

    def __init__(self, seed, depths):
        self.depths = depths
        self._rng = np.random.default_rng(seed)
        self.chosen = set()

    def choose(self, load):
        depth = int(self._rng.choice(self.depths))
        self.chosen.add(depth)
        return Decision(num_speculative_tokens=load.limit(depth), reason="random")

    def observe(self, outcome):
        pass


# By builder: what `generate` is given.
BUILDERS = {
    "widths": dict(speculative_config=dict(model="demo", speculative_token_tree=(3, 2, 1))),
    "paths": dict(
        speculative_config=dict(
            model="demo",
            speculative_token_tree="[(0,), (1,), (2,), (0, 0), (1, 0), (0, 0, 0)]",
        )
    ),
    "best static": dict(
        speculative_config=dict(
            model="demo",
            speculative_token_tree=best_static.best_tree(
                (0.7, 0.15, 0.05), num_nodes=10, max_depth=4
            ).shape.rank_paths,
        )
    ),
    "grown": dict(
        speculative_config=dict(
            model="demo", tree_top_k=3, num_speculative_tokens=4, num_draft_nodes=10
        )
    ),
    "merged matches": dict(
        speculative_config=dict(method="ngram", prompt_lookup_matches=3, prompt_lookup_min=1)
    ),
    "best first": dict(
        drafter=LoadedDrafter("marginals", MarginalsDrafter(4, 9)),
        num_speculative_tokens=3,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("builder", BUILDERS)
def test_any_builder_samples_the_same_tokens(builder):
    out = specjax.generate(target(), prompts(), sampling=EVERYTHING, **BUILDERS[builder])
    assert hold_against(out, plain("everything")) <= 1
    counts = out.stats.acceptance
    assert 0 < counts.num_accepted < counts.num_drafted
    # Trees, and not chains in disguise: more nodes than depth.
    assert counts.num_drafted > sum(counts.drafted_at)


@pytest.mark.slow
@pytest.mark.parametrize("depths", [(0, 3), (0, 1, 2, 3)], ids=str)
def test_depth_tree_and_drafter_change_from_step_to_step(depths):
    draft = specjax.load_model("demo-draft")
    shape = static_shapes.from_widths((3, 2, 1))
    policy = RandomDepth(0, depths)
    out = specjax.generate(
        target(),
        prompts(),
        drafter=LoadedDrafter("alternating", AlternatingDrafter(draft.config, shape), draft.params),
        sampling=EVERYTHING,
        num_speculative_tokens=3,
        engine=EngineConfig(burst_steps=1),
        policy=policy,
    )
    assert policy.chosen == set(policy.depths)
    assert hold_against(out, plain("everything")) <= 1
    assert 0 < out.stats.acceptance.num_accepted < out.stats.acceptance.num_drafted
