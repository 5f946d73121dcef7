"""The names of drafters, and suggestions for misspelt names."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, TypeAlias

NO_DRAFTER, DEMO = "none", "demo"
MATCHING = ("ngram", "history")  # drafters that need no weights
SELF_DRAFTING = ("self-int8", "self-int4")  # whose weights are made from the target's
BY_NAME = (*MATCHING, *SELF_DRAFTING)  # drafters that are no files
# What the package holds, and the folders of it. "demo" as a drafter is "demo-draft".
DEMO_FOLDERS = {
    DEMO: "target",
    "demo-draft": "draft",
    "demo-eagle3": "eagle3",
    "demo-dspark": "dspark",
}
DEMO_HEADS = ("demo-eagle3", "demo-dspark")
DRAFTERS = (NO_DRAFTER, *BY_NAME, DEMO, *DEMO_HEADS)
DrafterName: TypeAlias = Literal[
    "none", "ngram", "history", "self-int8", "self-int4", "demo", "demo-eagle3", "demo-dspark"
]
Method: TypeAlias = Literal[
    "ngram",
    "history",
    "self-int8",
    "self-int4",
    "draft_model",
    "eagle",
    "eagle3",
    "mtp",
    "dflash",
    "dspark",
    "medusa",
    "mlp_speculator",
]
# What can be trained, and by which optimisers.
TrainedKind: TypeAlias = Literal[
    "eagle3",
    "p-eagle",
    "eagle",
    "mtp",
    "dflash",
    "dspark",
    "medusa",
    "mlp_speculator",
    "draft_model",
]
OptimizerName: TypeAlias = Literal["muon", "adamw"]
# Names of drafters, commands and classes of other libraries and programs, and what is here.
ELSEWHERE = {
    "suffix": "'history' reads on in earlier texts, 'ngram' in the text itself",
    "prompt_lookup": "'ngram' reads on in the text itself",
    **dict.fromkeys(
        ("eagle", "eagle3", "mtp", "medusa", "dflash", "dspark", "mlp_speculator"),
        "a head is named by its folder; 'demo-eagle3' and 'demo-dspark' are the embedded model's",
    ),
    **dict.fromkeys(
        ("serve", "server"),
        "examples/server.py of the repository serves OpenAI's clients, specjax.Engine a program",
    ),
    **dict.fromkeys(
        ("chat", "interactive"),
        "examples/chat.py of the repository is a chat on a terminal, `specjax generate --chat` "
        "sends one message, specjax.Chat is a prompt of messages",
    ),
    "compare": "`specjax generate --compare`, or specjax.compare in a program",
    "stream": "`specjax generate` writes the text of one prompt as it comes",
    **dict.fromkeys(("run", "complete", "infer", "pipeline"), "`specjax generate`"),
    **dict.fromkeys(("rollout", "score"), "specjax.rollout and specjax.score, in a program"),
    **dict.fromkeys(
        ("download", "pull"), "`--model org/name` is fetched from the Hugging Face Hub"
    ),
    **dict.fromkeys(("quantize", "convert"), "specjax.save_pretrained(..., stored='int8')"),
    **dict.fromkeys(("info", "show"), "`specjax inspect`"),
    "calibrate": "`specjax bench --calibrate`",
    **dict.fromkeys(("train", "finetune"), "`specjax train`, specjax.training.train in a program"),
    "version": "`specjax --version`",
    **dict.fromkeys(
        ("LLM", "LLMEngine", "AsyncLLM", "AsyncLLMEngine"),
        "specjax.generate takes prompts at once, specjax.Engine requests that come and go",
    ),
    **dict.fromkeys(
        ("AutoModel", "AutoModelForCausalLM", "from_pretrained", "load"), "specjax.load_model"
    ),
    **dict.fromkeys(("AutoTokenizer", "Tokenizer"), "specjax.load_model(path).tokenizer"),
    "GenerationConfig": "specjax.SamplingParams",
    "check_drafter": "specjax.testing.check_drafter",
    "check_family": "specjax.testing.check_family",
}
SIMILARITY = 0.6  # similarity of names, 0 to 1, from which one is suggested for the other


def closest(name: str, known: Iterable[str], similarity: float = SIMILARITY) -> str | None:
    """Returns the known name that `name` misspells, or None."""
    found = difflib.get_close_matches(name, list(known), 1, similarity)
    return found[0] if found else None


# Classes that functions return, which are no names of `specjax`; docs/api/results.md has them.
RETURNED = {
    "AdaptStats": "specjax.engine.adapting",
    "AdapterState": "specjax.training",
    "AdapterStats": "specjax.training",
    "CacheFill": "specjax.engine.lineage",
    "Chunk": "specjax.api.results",
    "ComparedDrafter": "specjax.api.comparing",
    "Comparison": "specjax.api.comparing",
    "Generation": "specjax.api.results",
    "GenerationStats": "specjax.api.results",
    "ImportanceWeights": "specjax.rl.gaps",
    "PolicyLogProbs": "specjax.rl.policy",
    "RolloutStream": "specjax.rl.stream",
    "RolloutTurns": "specjax.rl.batch",
    "SelfCheck": "specjax.engine.request",
}


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns " (did you mean ...?)" for a misspelt name, or what is here in place of a name of
    ELSEWHERE; else nothing."""
    if name in ELSEWHERE:
        return f" ({ELSEWHERE[name]})"
    if name in RETURNED:
        return f" (from {RETURNED[name]} import {name})"
    meant = closest(name, known)
    return "" if meant is None else f" (did you mean {meant!r}?)"


def check_drafter(name: str | os.PathLike[str]) -> None:
    """Raises unless a name is one of DRAFTERS, a folder, or a hub name.

    A hub name is "org/name": no other name is looked up on the network.

    Raises:
      ValueError: the name is unknown; the message lists the known ones.
    """
    text = os.fspath(name)
    known = (*DRAFTERS, *DEMO_FOLDERS)
    # A name with a separator is a path or a hub name, for `load_model` to find.
    if text in known or os.path.basename(text) != text:
        return
    if not isinstance(name, str) or Path(text).expanduser().exists():
        return
    raise ValueError(
        f"drafter {text!r} is unknown{suggestion(text, DRAFTERS)}; expected one of "
        f"{', '.join(map(repr, DRAFTERS))}, a folder with a draft model, or its name on the "
        "Hugging Face Hub, as 'org/name'."
    )
