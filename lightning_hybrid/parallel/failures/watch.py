"""Each rank's end of the lines over which ranks hear of failures, and the end of a process that cannot end itself."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NoReturn

from lightning_hybrid.parallel.failures.failure import Failure, this_process
from lightning_hybrid.parallel.failures.hub import CHUNK, Address, Lines, encode, keep_from_forks

POLL = 1.0  # seconds between looks at the parent and the clock
GRACE = 8.0  # seconds in which a rank ends by itself after another one has failed
LAST_WORDS = 60.0  # seconds that a rank that raised may spend in hooks for exceptions


def end_process(text: str, children: Iterable[int] = ()) -> NoReturn:
    """Write to stderr and end this process and its children, whatever its other threads hang in.

    Args:
        text: The last words.
        children: Process ids, beside those that `multiprocessing` knows.
    """
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode(errors="replace"))  # sys.stderr may be held by a thread that hangs
    for child in multiprocessing.active_children():
        child.kill()
    for pid in children:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    os._exit(1)


class Watch:
    """A thread that hears of other ranks' failures, and ends the process where it does not end by itself.

    Args:
        rank: World rank of this process.
        parent: Process that must outlive this one; None where there is no such.
        end: Called with the last words when the process has to end.
    """

    def __init__(self, rank: int, *, parent: int | None = None, end: Callable[[str], object] = end_process) -> None:
        self.rank, self._parent, self._end = rank, parent, end
        self._socket: socket.socket | None = None
        self._process_of_rank_0 = ""
        self._lines = Lines()
        self._first: Failure | None = None
        self._deadline: float | None = None
        self._has_failed = self._is_free = False
        self._stopped, self._wake = threading.Event(), threading.Event()
        self._knows, self._together = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="failure-watch", daemon=True)
        self._thread.start()

    def join(self, address: Address) -> None:
        """Open the line to rank 0; without one, failures are noticed only as the launcher and the backend do."""
        try:
            end = keep_from_forks(socket.create_connection((address.host, address.port), timeout=10))
            end.settimeout(POLL)
            end.sendall(encode({"token": address.token, "rank": self.rank, "process": this_process()}))
        except OSError as error:
            warnings.warn(
                f"Rank {self.rank} does not reach rank 0 at {address.host}:{address.port} ({error}): when a rank "
                "fails, the others may wait until their collectives time out.",
                stacklevel=2,
            )
            return
        self._socket, self._process_of_rank_0 = end, address.process
        self._wake.set()

    def report(self, failure: Failure) -> None:
        """Tell all ranks that this one has failed."""
        self.fail()
        self._send({"failure": asdict(failure)})

    def fail(self) -> None:
        """Note that this rank is about to end, so that it gets the time for it."""
        self._has_failed, self._deadline = True, time.monotonic() + LAST_WORDS

    def first(self, timeout: float) -> Failure | None:
        """The first failure of another rank, waited for up to `timeout` seconds."""
        if self._socket is not None:
            self._knows.wait(timeout)
        return self._first

    def together(self, timeout: float) -> bool:
        """Whether all ranks have reported an error of their own from the same place, waited for up to `timeout`."""
        return self._socket is not None and self._together.wait(timeout)

    def stop(self) -> None:
        """End the thread and close the line; what this process does from now on is no failure."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._wake.set()
            self._send({"bye": True})
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
            self._thread.join()

    def _send(self, message: dict[str, Any]) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.sendall(encode(message))

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._listen()
            self._look()
        if self._socket is not None:
            self._socket.close()

    def _listen(self) -> None:
        """Wait for a message, for something to listen to, or for the next look around."""
        if self._socket is None or self._is_free:
            self._wake.wait(POLL)
            return self._wake.clear()
        try:
            data = self._socket.recv(CHUNK)
        except TimeoutError:
            return None
        except OSError:
            data = b""
        if data:
            for message in self._lines.feed(data):
                self._hear(message)
        elif not self._stopped.is_set():
            self._is_free = True
            self._learn(Failure.vanished(0, self._process_of_rank_0))
        return None

    def _hear(self, message: dict[str, Any]) -> None:
        if "first" in message:
            self._learn(Failure(**message["first"]))
        elif "together" in message:
            self._together.set()
        elif "bye" in message:
            self._is_free = True

    def _learn(self, failure: Failure) -> None:
        if self._first is None and failure.rank != self.rank:
            self._first = failure
            if not self._has_failed:
                self._deadline = time.monotonic() + GRACE
            self._knows.set()

    def _look(self) -> None:
        orphaned = self._parent is not None and os.getppid() != self._parent and not (self._is_free and not self._first)
        late = self._deadline is not None and time.monotonic() > self._deadline
        if not (orphaned or late) or self._stopped.is_set():
            return
        self._stopped.set()
        reason = "the process of rank 0, which started this one, is gone"
        if self._first is not None:
            reason = self._first.describe()
        elif self._has_failed:
            reason = f"it failed and has hung for {LAST_WORDS:.0f} s in hooks for exceptions"
        self._end(f"[rank {self.rank}] This process is ended: {reason}")
