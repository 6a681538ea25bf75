"""A script whose rank is struck, as a user starts it: python -m tests.struck FOLDER RANK MOMENT WAY."""

import sys
from pathlib import Path

from tests.jobs import strike

if __name__ == "__main__":
    folder, rank, moment, way = sys.argv[1:]
    strike(Path(folder), int(rank), moment, way)
