"""330 folders of drafters with one thing wrong: a clear error or valid drafts, soon and small.

Nothing in a folder is executed. Every kind of head is among them, and a draft model over masks. All
of them with their drafts take some minutes:

    pytest -n 0 -m slow tests/specjax/heads/test_head_mutations.py
"""

import sys
from pathlib import Path

import pytest
from folder_sweep import sweep

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measures by /proc")

SCRIPT = Path(__file__).with_name("head_mutations.py")
MOST_MEGABYTES = 200.0


@pytest.mark.full
def test_66_folders_are_loaded_or_refused(tmp_path, say):
    sweep(SCRIPT, range(66), tmp_path, say, MOST_MEGABYTES)


@pytest.mark.slow
def test_330_folders_draft_or_are_refused(tmp_path, say):
    sweep(SCRIPT, range(330), tmp_path, say, MOST_MEGABYTES, "--drafts")
