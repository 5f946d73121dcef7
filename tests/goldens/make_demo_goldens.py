"""Writes what transformers generates greedily from the embedded target.

    pip install ".[reference]" && python tests/goldens/make_demo_goldens.py

Run again whenever the embedded weights change; the test says so when they have.
"""

import hashlib
import json
import tempfile
from pathlib import Path

from specjax.demo import TARGET_FOLDER

GOLDEN = Path(__file__).parent / "demo_greedy.json"
NEW_TOKENS = 128
PROMPTS = [
    "def fibonacci(n):",
    "import os\nimport sys\n",
    "class Queue:\n    def __init__(self",
    "def read_file(path):\n    with open(path) as",
    "for i in range(10):\n",
    "try:\n    import json\nexcept ImportError:",
    "    def __repr__(self):\n        return",
    "if __name__ == '__main__':",
    "# Copyright",
    '"""Utilities for',
    "def main(argv=None):\n    parser =",
    "    while True:\n        line = ",
    "raise ValueError(",
    "@property\ndef name(self):",
    "assert isinstance(",
    "from collections import",
    "    return [x for x in",
    "lambda x:",
    "async def connect(self, host, port):",
    "def test_add(self):\n        self.assertEqual(",
]


def weights_digest() -> str:
    """Returns the sha256 of the embedded target's weights."""
    return hashlib.sha256((TARGET_FOLDER / "model.safetensors").read_bytes()).hexdigest()


def transformers_outputs() -> list[dict[str, list[int]]]:
    """Returns ids of prompts and greedy outputs, float32.

    transformers does not read int8 embeddings that are the head too, so it gets what they are
    multiplied out to.
    """
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    import specjax

    with tempfile.TemporaryDirectory() as folder:
        specjax.save_pretrained(specjax.load_model("demo", dtype="float32"), folder + "/model")
        model = AutoModelForCausalLM.from_pretrained(folder + "/model", dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(TARGET_FOLDER / "tokenizer.json"))
    outputs = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).ids
        with torch.no_grad():
            out = model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False)
        outputs.append({"prompt": ids, "output": out[0, len(ids) :].tolist()})
    return outputs


def main() -> None:
    """Writes the golden file."""
    golden = {"weights_sha256": weights_digest(), "texts": transformers_outputs()}
    GOLDEN.write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
