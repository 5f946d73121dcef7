"""Runs the `specjax` command for `python -m specjax`."""

import sys

from specjax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
