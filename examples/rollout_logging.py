"""Numbers of rollouts in Weights & Biases, in TensorBoard, or on the terminal.

    python examples/rollout_logging.py --logger wandb

`record` takes any object with `log(numbers, step=...)`, as a run of wandb is.
"""

import argparse

import jax
import numpy as np

import specjax

PROMPTS = ["def main():", "class Queue:"]
NUM_SAMPLES = 4


class Terminal:
    """Prints one line a step, of some of the numbers."""

    SHOWN = (
        "reward/mean",
        "rollout/mean_length",
        "rollout/tokens_per_second",
        "policy/mean_logprob",
    )

    def log(self, numbers, step):
        print(f"step {step}", *(f"{name} {numbers[name]:.4g}" for name in self.SHOWN), sep="  ")


class TensorBoard:
    """Writes event files into a folder."""

    def __init__(self, folder):
        from tensorboardX import SummaryWriter  # pip install tensorboardX

        self._writer = SummaryWriter(folder)

    def log(self, numbers, step):
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


def logger_named(name):
    if name == "wandb":
        import wandb  # pip install wandb

        return wandb.init(project="specjax")
    return TensorBoard("runs") if name == "tensorboard" else Terminal()


def record(logger, rollout, rewards, step):
    """Logs what a rollout measured, and its rewards f32[num_samples]."""
    of_group = rewards.reshape(-1, NUM_SAMPLES)
    numbers = {f"rollout/{name}": value for name, value in rollout.metrics.items()}
    numbers["reward/mean"] = rewards.mean()
    numbers["reward/std_within_prompts"] = of_group.std(axis=1).mean()
    numbers["policy/mean_logprob"] = np.asarray(rollout.logprobs.raw)[rollout.loss_mask].mean()
    logger.log({name: float(value) for name, value in numbers.items()}, step=step)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--logger", choices=("terminal", "wandb", "tensorboard"), default="terminal"
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args(argv)

    logger = logger_named(args.logger)
    policy = specjax.load_model("demo")
    decoder = specjax.build_decoder(policy, drafter="history", num_speculative_tokens=4)
    params = policy.params
    for step in range(args.steps):
        sampling = specjax.SamplingParams(max_tokens=args.max_tokens, seed=step)
        batch = specjax.rollout(
            decoder, params, PROMPTS, num_samples=NUM_SAMPLES, sampling=sampling
        )
        texts = [
            policy.tokenizer.decode(ids[mask])
            for ids, mask in zip(
                np.asarray(batch.completion_ids), np.asarray(batch.completion_mask)
            )
        ]
        rewards = np.array([text.count("return") for text in texts], np.float32)
        record(logger, batch, rewards, step)
        params = jax.tree.map(lambda leaf: leaf * 0.999, params)  # stands for an optimiser's step


if __name__ == "__main__":
    main()
