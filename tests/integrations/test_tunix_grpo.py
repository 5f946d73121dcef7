"""tunix's command for GRPO, with the engine of `specjax.integrations.tunix_grpo`."""

from __future__ import annotations

import json
import pathlib
import warnings

import jax
import pytest
from absl import flags

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # tunix uses what newer jax and flax deprecate
    pytest.importorskip("tunix")
    import tunix_scripts
    from tunix.cli import grpo_main
    from tunix.rl import rl_cluster

    from specjax.integrations import tunix_grpo
    from specjax.integrations.tunix import SpecjaxRollout

pytestmark = [
    pytest.mark.tunix,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

MODEL = {
    "model_name": "qwen3-0.6b",
    "model_source": "huggingface",
    "model_id": "Qwen/Qwen3-0.6B",
    "model_path": "",
    "model_download_path": "",
    "intermediate_ckpt_dir": "unused",
    "mesh": {"shape": "(1,1)", "axis_names": "('fsdp','tp')"},
}
SHARED = {**MODEL, "mesh": None, "same_mesh_as": "actor"}
# The sections that tunix's command reads, for a model of no size.
CONFIGURATION = {
    "model_config": MODEL,
    "actor_model_config": MODEL,
    "reference_model_config": SHARED,
    "rollout_model_config": SHARED,
    "tokenizer_config": {"tokenizer_path": "Qwen/Qwen3-0.6B", "tokenizer_type": "huggingface"},
    "data_module": "tunix_grpo_data",
    "apply_chat_template_to_dataset": False,
    "batch_size": 3,
    "num_batches": 2,
    "num_train_epochs": 1,
    "train_fraction": 1.0,
    "rl_training_config": {
        "actor_optimizer_config": {"opt_type": "adamw", "learning_rate": 0.01},
        "eval_every_n_steps": 100,
        "max_steps": 2,
    },
    "rollout_engine": "vanilla",
    "rollout_config": {
        "total_generation_steps": 12,
        "max_prompt_length": 24,
        "temperature": 0.9,
        "top_p": 1.0,
    },
    "grpo_config": {"num_generations": 2, "num_iterations": 1, "beta": 0.08, "epsilon": 0.2},
    "offload_to_cpu": False,
    "reward_functions": [],
}


@pytest.fixture(scope="module", autouse=True)
def flags_of_no_command_line():
    flags.FLAGS(["program"])


def test_arguments():
    engine, rest = tunix_grpo.engine_of(
        [
            "program",
            "base.yaml",
            "specjax_config.drafter=ngram",
            "batch_size=2",
            "specjax_config.engine.max_rows=8",
            "specjax_config.engine.numerics=invariant",
            "specjax_config.keeps_eos=true",
            "specjax_config.verification=null",
        ]
    )
    assert rest == ["program", "base.yaml", "batch_size=2"]
    assert engine.func is SpecjaxRollout
    assert engine.keywords == {
        "drafter": "ngram",
        "engine": {"max_rows": 8, "numerics": "invariant"},
        "keeps_eos": True,
        "verification": None,
    }
    with pytest.raises(ValueError, match=r"'specjax_config\.drafter' has no value"):
        tunix_grpo.engine_of(["program", "base.yaml", "specjax_config.drafter"])


@pytest.mark.parametrize("command", [grpo_main, tunix_grpo])
def test_a_configuration_is_run(command, tmp_path, monkeypatch):
    """The same arguments with one word changed, but for a model and a tokenizer of no size."""
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parent))
    import tunix_grpo_data

    made = []
    model_lib = grpo_main.model_lib
    monkeypatch.setattr(model_lib, "create_model", lambda *_: (tunix_scripts.policy(), None))
    monkeypatch.setattr(model_lib, "create_tokenizer", lambda *_: tunix_scripts.Characters())
    monkeypatch.setattr(
        grpo_main.GrpoPipeline, "obtain_reward_fn", lambda _: [tunix_grpo_data.share_of_digits]
    )
    # tunix takes devices by coordinates, which forced ones have in common.
    meshes = dict.fromkeys(("ACTOR", "REFERENCE", "ROLLOUT"), tunix_scripts.MESH)
    meshes = {rl_cluster.Role[name]: mesh for name, mesh in meshes.items()}
    monkeypatch.setattr(grpo_main.GrpoPipeline, "create_role_to_mesh", lambda _: meshes)
    monkeypatch.setattr(
        rl_cluster,
        "RLCluster",
        lambda *arguments, _make=rl_cluster.RLCluster, **options: (
            made.append(_make(*arguments, **options)) or made[-1]
        ),
    )
    monkeypatch.setenv("HF_TOKEN", "none")
    file = tmp_path / "base.yaml"
    file.write_text(json.dumps(CONFIGURATION))  # which is YAML too
    arguments = ["program", str(file), "batch_size=3"]
    if command is tunix_grpo:
        arguments += ["specjax_config.engine.page_size=8", "specjax_config.keeps_eos=true"]
    theirs = grpo_main.GrpoPipeline
    jax.config.update("jax_numpy_rank_promotion", "allow")  # which tunix needs
    try:
        command.main(arguments)
    finally:
        jax.config.update("jax_numpy_rank_promotion", "raise")
    assert grpo_main.GrpoPipeline is theirs
    (cluster,) = made
    assert cluster.global_steps == 2
    assert isinstance(cluster.rollout, SpecjaxRollout) == (command is tunix_grpo)
    if command is tunix_grpo:
        assert cluster.rollout.num_conversions == 2
        assert cluster.rollout.decoder._setup.engine.page_size == 8


def test_a_configuration_is_asked_for():
    with pytest.raises(ValueError, match="path to a base config file"):
        tunix_grpo.main(["program"])
