"""Training scripts in the way of tunix's examples: GRPO, and agentic GRPO with a tool.

Both take `rollout_engine`, the one argument of a script that names the engine: "vanilla" is
tunix's own. A small random Qwen3 stands in for a model, characters for tokens.
"""

from __future__ import annotations

import dataclasses
import re
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # tunix uses what newer jax and flax deprecate
    from tunix.models.qwen3 import model as qwen3
    from tunix.rl import common
    from tunix.rl import rl_cluster as clusters
    from tunix.rl.agentic import agentic_grpo_learner as agentic
    from tunix.rl.agentic.agents.tool_agent import ToolAgent
    from tunix.rl.agentic.environments.tool_environment import ToolEnvironment
    from tunix.rl.agentic.parser.chat_template_parser.parser import (
        BaseChatTemplateParser,
        TokenConfig,
    )
    from tunix.rl.agentic.parser.tool_parser.tool_parser_base import ToolParser
    from tunix.rl.agentic.tools.base_tool import ToolCall
    from tunix.rl.agentic.tools.calculator_tool import CalculatorTool
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rollout import base_rollout

PAD, EOS = 0, 1
END = "<END>"  # of a message, one token
FIRST, SYMBOLS = 2, 62  # the characters from " " to "]"
MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
QUESTIONS = ["ADD 2 AND 3", "HOW MUCH IS 7 * 6", "7 - 5"]


class Characters:
    """A tokenizer with a token per character, and one that ends messages."""

    bos_token, eos_token = "", END

    def encode(self, text, **kwargs):
        parts = re.split(f"({END})", text.upper())
        ids = [[EOS] if part == END else [*map(self._token, part)] for part in parts]
        return [token for part in ids for token in part]

    def decode(self, ids, **kwargs):
        return "".join(chr(32 + i - FIRST) if i >= FIRST else ("", END)[i] for i in ids)

    def _token(self, character):
        return FIRST + (ord(character) - 32) % SYMBOLS

    def bos_id(self):
        return None

    def eos_id(self):
        return EOS

    def pad_id(self):
        return PAD


def policy(seed=0, ends=1.6):
    """Returns a random Qwen3; the logit of the token that ends a message is `ends` times larger."""
    sizes = qwen3.ModelConfig(
        num_layers=2,
        vocab_size=64,
        embed_dim=32,
        hidden_dim=48,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=1_000_000,
        norm_eps=1e-6,
    )
    built = qwen3.Qwen3(sizes, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(seed)
    for path, variable in nnx.to_flat_state(nnx.state(built, nnx.Param)):
        noise = jnp.asarray(rng.standard_normal(variable.shape), variable.dtype)
        weight = 1 + 0.2 * noise if noise.ndim == 1 else 0.2 * noise
        if path[0] == "lm_head":
            weight = weight.at[:, PAD].set(0).at[:, EOS].multiply(ends)
        variable.set_value(weight)
    return built


@dataclasses.dataclass
class Watched:
    """What a script did: each call of the engine, and each batch that the trainer was given."""

    cluster: clusters.RLCluster
    learner: object = None
    calls: list = dataclasses.field(default_factory=list)  # (step, prompts, output)
    batches: list = dataclasses.field(default_factory=list)  # (example, tunix's own logps)
    rewards: list = dataclasses.field(default_factory=list)  # one list per call of the function
    weights: list = dataclasses.field(default_factory=list)  # of the policy, before each update
    traces: list = dataclasses.field(
        default_factory=list
    )  # of specjax's engine, before each update
    most_at_once: int = 0  # calls of the engine that ran at the same time

    def __post_init__(self):
        generate, update = self.cluster.rollout.generate, self.cluster.update_actor
        lock, running = threading.Lock(), []

        def watched_generate(prompts, config, **options):
            with lock:
                running.append(prompts)
                self.most_at_once = max(self.most_at_once, len(running))
            output = generate(prompts, config, **options)
            with lock:
                running.remove(prompts)
                self.calls.append((len(self.weights), prompts, output))
            return output

        def watched_update(examples, *arguments):
            self.weights.append(arrays(self.cluster.actor_trainer.model))
            decoder = getattr(self.cluster.rollout, "decoder", None)
            self.traces.append(decoder and decoder.num_traces)
            examples = list(examples)
            self.batches += [(example, self._logps(example)) for example in examples]
            update(examples, *arguments)

        self.cluster.rollout.generate = watched_generate
        self.cluster.update_actor = watched_update

    def _logps(self, example):
        """Returns what tunix's forward says of a batch, under the weights that sampled it."""
        graphdef, state = nnx.split(self.cluster.actor_trainer.model)
        temperature = self.cluster.cluster_config.rollout_config.temperature
        return common.compute_per_token_logps(
            graphdef,
            state,
            prompt_tokens=example.prompt_ids,
            completion_tokens=example.completion_ids,
            pad_id=PAD,
            eos_id=EOS,
            temperature=temperature,
        )


def arrays(model):
    """Returns the weights of a model, copied to the host."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]


def cluster_of(rollout_engine, rollout_config, steps, rollout_mesh, **training):
    """Returns the actor, the frozen reference and the engine, as the examples put them together."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    cluster_config = clusters.ClusterConfig(
        role_to_mesh={
            clusters.Role.ACTOR: MESH,
            clusters.Role.REFERENCE: MESH,
            clusters.Role.ROLLOUT: rollout_mesh or MESH,
        },
        rollout_engine=rollout_engine,  # the one line
        training_config=clusters.RLTrainingConfig(
            actor_optimizer=optimizer, eval_every_n_steps=1000, max_steps=steps, **training
        ),
        rollout_config=base_rollout.RolloutConfig(**rollout_config),
    )
    cluster = clusters.RLCluster(
        actor=policy(), reference=policy(), tokenizer=Characters(), cluster_config=cluster_config
    )
    return Watched(cluster)


# GRPO


def grpo(rollout_engine, *, steps=3, rollout_mesh=None, **rollout_config):
    """Trains a policy to write digits; returns a Watched."""
    asked = {
        "max_tokens_to_generate": 12,
        "max_prompt_length": 24,
        "kv_cache_size": 64,
        "temperature": 0.9,
        "return_logprobs": True,
    }
    run = cluster_of(rollout_engine, asked | rollout_config, steps, rollout_mesh)

    def share_of_digits(prompts, completions, answer, **kwargs):
        assert len(prompts) == len(completions) == len(answer)
        run.rewards.append([sum(map(str.isdigit, text)) / 12 for text in completions])
        return run.rewards[-1]

    run.learner = GRPOLearner(
        rl_cluster=run.cluster,
        reward_fns=[share_of_digits],
        algo_config=GRPOConfig(num_generations=4, num_iterations=1, beta=0.04, epsilon=0.2),
    )
    batch = {"prompts": np.array(QUESTIONS), "answer": np.array(["5", "42", "2"])}
    run.learner.train([batch] * steps)
    return run


# Agentic GRPO: dialogues with a tool


class Turns(BaseChatTemplateParser):
    """A chat template; each message ends with the token that ends a completion."""

    def _init_tokens(self):
        return TokenConfig(
            eot_token=END,
            system_token="<SYS>",
            user_token="<USER>",
            assistant_token="<BOT>",
            tool_response_start_token="<TOOL>",
        )

    def _init_generation_prompt(self):
        return self.tokens.assistant_token


class Sums(ToolParser):
    """Takes what a random policy writes for calls of a calculator, as long as it has two symbols.

    The operation may be a division by zero, or none at all: then the tool fails.
    """

    def parse(self, model_response):
        if len(model_response) < 2 or "A" in model_response:
            return []  # an answer
        a, b = (ord(symbol) % 3 for symbol in model_response[:2])
        operation = "+-*/?"[len(model_response) % 5]
        return [ToolCall("calculator", {"a": a, "b": b, "op": operation})]

    def get_tool_prompt(self, tools, *, schema_style="openai"):
        return f" TOOLS: {', '.join(tool.name for tool in tools)}"


class Agent(ToolAgent):
    """tunix's agent with tools, and another way to write a call."""

    def __init__(self, system_prompt, tool_map):
        super().__init__(system_prompt, tool_map=tool_map)
        self.tool_parser = Sums()
        self.tools_prompt = self.tool_parser.get_tool_prompt(self.tool_manager.get_tools())
        self._init_messages(system_prompt)


TOOLS = {"calculator": CalculatorTool}


def agentic_grpo(
    rollout_engine, *, steps=3, rollout_mesh=None, max_response=120, training=None, **rollout_config
):
    """Trains a policy in dialogues of at most three turns; returns a Watched."""
    asked = {
        "max_tokens_to_generate": max_response,
        "max_prompt_length": 96,
        "kv_cache_size": 96 + max_response + 64,
        "temperature": 0.9,
        "return_logprobs": True,
    }
    run = cluster_of(
        rollout_engine, asked | rollout_config, steps, rollout_mesh, **(training or {})
    )

    def is_short(task, action):
        reward = 1 / (1 + len(action))
        run.rewards.append(reward)
        return reward

    run.learner = agentic.GRPOLearner(
        rl_cluster=run.cluster,
        agent_class=Agent,
        agent_kwargs={"tool_map": TOOLS},
        env_class=ToolEnvironment,
        env_kwargs={"tool_map": TOOLS, "max_steps": 3, "reward_fn": is_short},
        algo_config=agentic.GRPOConfig(
            num_generations=4,
            num_iterations=1,
            max_response_length=max_response,
            beta=0.04,
            epsilon=0.2,
            system_prompt="USE TOOLS.",
            max_concurrency=12,
            off_policy_steps=0,
        ),
        chat_parser=Turns(Characters()),
    )
    batch = {"prompts": QUESTIONS, "question": QUESTIONS}
    run.learner.train([batch] * steps)
    return run
