"""``python -m lightning_hybrid.cli``: the console script without an entry point."""

import sys

from lightning_hybrid.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
