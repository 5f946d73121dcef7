"""Draws a generation of the embedded pair as docs/generation.svg: `python docs/draw_generation.py`.

Each token stands on the colour of whoever proposed it, as on a terminal.
"""

import html
from pathlib import Path

import specjax

PROMPT = "class Config:\n    def __init__(self, path):"
NUM_TOKENS = 110
CHARACTER, LINE, MARGIN = 8.4, 20, 16
COLOURS = {"prompt": "#8b949e", "target": "#e6edf3", "draft": "#56d364"}
BACKGROUND = "#0d1117"


def main() -> None:
    """Generates, prints the statistics that the picture shows, and writes the file."""
    sampling = specjax.SamplingParams(
        temperature=0.5, seed=1, max_tokens=NUM_TOKENS, ignore_eos=True
    )
    config = specjax.SpeculationConfig(policy="fixed", num_speculative_tokens=4)
    out = specjax.generate(
        "demo", PROMPT, drafter="demo", speculative_config=config, sampling=sampling
    )
    parts = [("prompt", PROMPT)]
    parts += [("draft" if p.is_draft else "target", p.text) for p in out[0].pieces]
    stats = out.stats
    summary = (
        f"{stats.num_output_tokens} tokens in {stats.acceptance.num_steps} steps of the target: "
        f"{stats.mean_acceptance_length:.2f} tokens per step, "
        f"{stats.acceptance_rate:.0%} of drafts accepted"
    )
    Path(__file__).with_name("generation.svg").write_text(draw(parts, summary))
    print(summary)


def draw(parts: list[tuple[str, str]], summary: str) -> str:
    """Returns the picture of texts and who they are from."""
    spans, column, row, widest = [], 0, 0, len(summary)
    for kind, text in parts:
        for index, piece in enumerate(text.split("\n")):
            if index:
                column, row = 0, row + 1
            if piece:
                spans.append(span(piece, column, row, COLOURS[kind]))
            column += len(piece)
            widest = max(widest, column)
    legend = [
        ("prompt  ", "prompt"),
        ("target's own  ", "target"),
        ("accepted draft", "draft"),
    ]
    column, row = 0, row + 2
    for text, kind in legend:
        spans.append(span(text, column, row, COLOURS[kind]))
        column += len(text)
    spans.append(span(summary, 0, row + 1, COLOURS["prompt"]))
    width, height = widest * CHARACTER + 2 * MARGIN, (row + 2) * LINE + 2 * MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14">'
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>'
        f"{''.join(spans)}</svg>\n"
    )


def span(text: str, column: int, row: int, colour: str) -> str:
    """Returns a run of text at a place of the grid."""
    x, y = MARGIN + column * CHARACTER, MARGIN + (row + 1) * LINE - 5
    length = len(text) * CHARACTER
    return (
        f'<text x="{x:.1f}" y="{y}" fill="{colour}" textLength="{length:.1f}" '
        f'xml:space="preserve">{html.escape(text)}</text>'
    )


if __name__ == "__main__":
    main()
