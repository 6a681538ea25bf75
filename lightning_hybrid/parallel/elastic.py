"""What a run and the launchers of its nodes tell each other, in files of a folder that they share.

```text
DIRPATH/
  elastic.json              what the run does: "running", "leaving" with the nodes that it invites, "ended"
  elastic-waiting/NAME      a node that waits outside; its launcher touches the file as long as it does
  elastic.ckpt              what the run left with
```

A node that joins torchrun's rendezvous makes all others restart their processes at once, in the middle of whatever. So
it waits outside, until the run has saved a checkpoint and invites it by its name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

EXIT_FOR_MORE_REPLICAS = 83
"""Exit code of processes that have saved a checkpoint and want to be started again, as more replicas."""

NODE = "LIGHTNING_HYBRID_NODE"  # for the processes of a node: its name, which ends with its agent's process
FILE, WAITING, CHECKPOINT = "elastic.json", "elastic-waiting", "elastic.ckpt"
STALE = 30.0  # seconds without a sign after which a node that waited counts as gone


class LeaveForMoreReplicas(SystemExit):
    """All ranks end, after a checkpoint, to be started again as more replicas; the exit code says so."""

    def __init__(self) -> None:
        super().__init__(EXIT_FOR_MORE_REPLICAS)


@dataclass(frozen=True)
class RunState:
    """What a run says of itself.

    Attributes:
        run: The id of torchrun's job, `--rdzv-id`.
        state: "running", "leaving" or "ended".
        replicas: Data replicas that there are.
        wanted: Those that the batch could use.
        nodes: Nodes that there are.
        batches: What the replicas share: loader batches of a step at all levels from the present one on have this
            divisor in common; 0 if nobody knows.
        invited: Names of the nodes that are to join.
    """

    run: str
    state: str
    replicas: int = 1
    wanted: int = 1
    nodes: int = 1
    batches: int = 0
    invited: tuple[str, ...] = ()


class Meeting:
    """The folder's files.

    Args:
        dirpath: A folder that all nodes share.
    """

    def __init__(self, dirpath: str | os.PathLike[str]) -> None:
        self.folder = Path(dirpath)

    @property
    def checkpoint(self) -> Path:
        """Where a run that leaves saves."""
        return self.folder / CHECKPOINT

    def read(self) -> RunState | None:
        """What the run says; None if there is none, or nothing that can be read."""
        try:
            found = json.loads((self.folder / FILE).read_text())
            return RunState(**{**found, "invited": tuple(found["invited"])})
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None

    def write(self, state: RunState) -> None:
        """Say it, in one atomic step; one process calls it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / f".{FILE}.{os.getpid()}.partial"
        partial.write_text(json.dumps(asdict(state)))
        partial.replace(self.folder / FILE)

    def forget(self) -> None:
        """Remove what a run says that is gone."""
        (self.folder / FILE).unlink(missing_ok=True)

    def wait_outside(self, name: str) -> None:
        """Say that a node waits; its launcher repeats it."""
        (self.folder / WAITING).mkdir(parents=True, exist_ok=True)
        (self.folder / WAITING / name).touch()

    def go(self, names: Sequence[str]) -> None:
        """Say that nodes do not wait any more."""
        for name in names:
            (self.folder / WAITING / name).unlink(missing_ok=True)

    def waiting(self) -> list[str]:
        """Names of the nodes that wait, in order of them.

        Times are those of the folder's file system, whatever the clocks of the nodes say.
        """
        with suppress(FileNotFoundError):
            clock = self.folder / f".{WAITING}.{os.getpid()}"
            clock.touch()
            now = clock.stat().st_mtime
            clock.unlink()
            found = [each for each in (self.folder / WAITING).iterdir() if now - each.stat().st_mtime < STALE]
            return sorted(each.name for each in found)
        return []
