"""The embedded default pair: a small trained target, its draft model, how they came to be.

Both folders are in Hugging Face format and load like any other checkpoint.
`python -m benchmarks.demo.train` makes them again from the standard library's source.
"""

from pathlib import Path

WEIGHTS_FOLDER = Path(__file__).parent / "weights"
TARGET_FOLDER = WEIGHTS_FOLDER / "target"
DRAFT_FOLDER = WEIGHTS_FOLDER / "draft"
