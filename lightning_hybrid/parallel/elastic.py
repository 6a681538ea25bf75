"""What a run and the launchers of its nodes tell each other, in files of a folder that they share.

```text
DIRPATH/
  elastic.json              what the run does: "running", "leaving" with the nodes that it invites, "ended"
  elastic-waiting/NAME      a node that waits outside; its launcher touches the file as long as it does
  elastic-running/NAME      a node of the run; its launcher writes the run's name to the file as long as it is one
  elastic.ckpt              what the run left with
```

A node that joins torchrun's rendezvous makes all others restart their processes at once, in the middle of whatever. So
it waits outside, until the run has saved a checkpoint and invites it by its name.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

EXIT_FOR_MORE_REPLICAS = 83
"""Exit code of processes that have saved a checkpoint and want to be started again, as more replicas."""

NODE = "LIGHTNING_HYBRID_NODE"  # for the processes of a node: its name, which ends with its agent's process
FILE, WAITING, RUNNING, CHECKPOINT = "elastic.json", "elastic-waiting", "elastic-running", "elastic.ckpt"
STALE = 30.0  # seconds without a sign after which a node counts as gone


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
        self._write(self.folder / FILE, json.dumps(asdict(state)))

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
        """Names of the nodes that wait, in order of them."""
        return sorted(path.name for path in self._fresh(WAITING))

    def take_part(self, name: str, run: str) -> None:
        """Say that a node is part of a run; its launcher repeats it."""
        path = self.folder / RUNNING / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.touch()
        else:
            self._write(path, run)

    def leave(self, name: str) -> None:
        """Say that a node is part of a run no more."""
        (self.folder / RUNNING / name).unlink(missing_ok=True)

    def running(self) -> dict[str, tuple[str, float]]:
        """The run that each node is part of, and when it has said so last."""
        found = {}
        for path in self._fresh(RUNNING):
            with suppress(OSError):  # it has just left
                found[path.name] = path.read_text(), path.stat().st_mtime
        return found

    def mark(self) -> str:
        """Make a file that all who share the folder see; its name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor, path = tempfile.mkstemp(prefix=".elastic-mark-", dir=self.folder)
        os.close(descriptor)
        return Path(path).name

    def _write(self, path: Path, text: str) -> None:
        partial = self.folder / f".{path.name}.{os.getpid()}.partial"
        partial.write_text(text)
        partial.replace(path)

    def _fresh(self, kind: str) -> list[Path]:
        """Files of nodes that have given a sign lately.

        Times are those of the folder's file system, whatever the clocks of the nodes say.
        """
        if not (self.folder / kind).is_dir():
            return []
        clock = self.folder / f".{kind}.{os.getpid()}"
        clock.touch()
        now, found = clock.stat().st_mtime, []
        clock.unlink()
        for path in (self.folder / kind).iterdir():
            with suppress(FileNotFoundError):
                found += [path] if now - path.stat().st_mtime < STALE else []
        return found
