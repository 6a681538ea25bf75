"""What one rank tells the others about its failure."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

LONGEST_MESSAGE, LONGEST_TRACE = 4_000, 8_000  # characters that travel
COMMUNICATION = ("/gloo/", "gloo::", "NCCL", "ncclInternal", "c10d::", "Connection closed by peer")


class OtherStageError(RuntimeError):
    """The step failed on another stage, which tells what happened there."""


@dataclass(frozen=True)
class Failure:
    """A rank's failure, as all ranks hear of it.

    Attributes:
        rank: World rank.
        kind: Name of the exception's type; empty if the process ended without a word.
        message: What the exception says, or what is known of the process.
        trace: Its traceback as text, shortened in the middle.
        place: Where in the run it was raised, outside a step; empty inside one.
        is_own: False for an error of communication, which follows from something else.
    """

    rank: int
    kind: str
    message: str
    trace: str = ""
    place: str = ""
    is_own: bool = True

    @classmethod
    def of(cls, error: BaseException, rank: int, place: str) -> Failure:
        """What an exception on this rank is to the others."""
        trace = "".join(traceback.format_exception(error))
        own = not is_communication_error(error)
        return cls(
            rank, type(error).__name__, _short(str(error), LONGEST_MESSAGE), _short(trace, LONGEST_TRACE), place, own
        )

    @classmethod
    def vanished(cls, rank: int, process: str) -> Failure:
        """A process that ended without saying why."""
        return cls(rank, "", f"{process} ended without a word, as one that was killed does (out of memory?)")

    @property
    def summary(self) -> str:
        """One line."""
        what = f"{self.kind}: {self.message}" if self.kind else self.message
        first = what.strip().splitlines()[0] if what.strip() else "no message"
        return f"rank {self.rank} failed first: {first}"

    def describe(self) -> str:
        """The whole story, with the traceback of the rank that failed."""
        what = f"{self.kind}: {self.message}" if self.kind else self.message
        story = f"rank {self.rank} failed first: {what}"
        if not self.trace:
            return story
        return f"{story}\n\nTraceback of rank {self.rank}:\n{self.trace.rstrip()}"


def this_process() -> str:
    """How other ranks call this process."""
    return f"its process ({os.getpid()} on {socket.gethostname()})"


def is_communication_error(error: BaseException) -> bool:
    """Whether an exception, or what caused it, says that a peer or a communicator is gone, or that a wait timed out."""
    return any(
        isinstance(link, dist.DistError | OtherStageError) or (isinstance(link, RuntimeError) and _tells_of_peers(link))
        for link in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: list[Any] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__


def _tells_of_peers(error: RuntimeError) -> bool:
    message = str(error)
    return any(word in message for word in COMMUNICATION)


def _short(text: str, longest: int) -> str:
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]}\n[...]\n{text[-half:]}"
