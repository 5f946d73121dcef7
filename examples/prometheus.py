"""Counters of an engine for Prometheus, by the names that vLLM gives them.

    python examples/prometheus.py

Dashboards made for vLLM then show acceptance of specjax too. Counters are of finished requests.
`server.py` has them at /metrics.
"""

import specjax


def metrics_text(stats, model_name):
    """Returns a GenerationStats in the text format of Prometheus."""
    counts = stats.acceptance
    counters = {
        "prompt_tokens": (stats.num_prompt_tokens, "Tokens of prompts."),
        "generation_tokens": (stats.num_output_tokens, "Tokens of output."),
        "num_preemptions": (stats.num_preemptions, "Times that a request was preempted."),
        # A draft is one row's in one step: those that drafted at least one token.
        "spec_decode_num_drafts": (sum(counts.drafted_at[:1]), "Drafts verified."),
        "spec_decode_num_draft_tokens": (counts.num_drafted, "Draft tokens verified."),
        "spec_decode_num_accepted_tokens": (counts.num_accepted, "Draft tokens accepted."),
    }
    label = 'engine="0",model_name="{}"'.format(
        model_name.replace("\\", "\\\\").replace('"', '\\"')
    )
    lines = []
    for name, (value, what) in counters.items():
        lines += [*_head(name, what), f"vllm:{name}_total{{{label}}} {value}"]
    name = "spec_decode_num_accepted_tokens_per_pos"
    lines += _head(name, "Draft tokens accepted, by their place in the draft.")
    for position, value in enumerate(counts.accepted_at):
        lines.append(f'vllm:{name}_total{{{label},position="{position}"}} {value}')
    return "\n".join(lines) + "\n"


def _head(name, what):
    return [f"# HELP vllm:{name}_total {what}", f"# TYPE vllm:{name}_total counter"]


def main():
    always = {"policy": "fixed", "num_speculative_tokens": 4}
    sampling = specjax.SamplingParams(temperature=0, max_tokens=64)
    with specjax.Engine("demo", drafter="demo", speculative_config=always) as engine:
        for prompt in ("def main():", "class Queue:"):
            engine.add(prompt, sampling)
        while engine.has_work:
            engine.step()
        print(metrics_text(engine.stats, "demo"), end="")


if __name__ == "__main__":
    main()
