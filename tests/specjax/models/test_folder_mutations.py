"""1,500 model folders with one thing wrong: a clear error or a right load, soon and small."""

import sys
from pathlib import Path

import pytest
from folder_sweep import sweep

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measures by /proc")

SCRIPT = Path(__file__).with_name("folder_mutations.py")
MOST_MEGABYTES = 1000.0


@pytest.mark.full
def test_sixty_folders_with_one_thing_wrong(tmp_path, say):
    sweep(SCRIPT, range(60), tmp_path, say, MOST_MEGABYTES)


@pytest.mark.slow
def test_1500_folders_with_one_thing_wrong(tmp_path, say):
    sweep(SCRIPT, range(1500), tmp_path, say, MOST_MEGABYTES)
