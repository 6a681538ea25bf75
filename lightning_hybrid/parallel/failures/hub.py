"""Rank 0's end of the lines over which ranks hear of failures: plain connections, beside all communicators.

The kernel closes a process's connections when it ends, however it ends. So the hub knows of a killed rank within
milliseconds, whatever the backend of the collectives notices, and needs no beats that a busy rank could miss.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import threading
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from lightning_hybrid.parallel.failures.failure import Failure, this_process

CHUNK = 65_536  # bytes read at a time
LOOPBACK = ("127.0.0.1", "localhost")

_of_this_process: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def keep_from_forks(end: socket.socket) -> socket.socket:
    """Close a socket in processes forked from this one: a loader's worker must not keep its parent's line open."""
    _of_this_process.add(end)
    return end


def _close_after_fork() -> None:
    for end in list(_of_this_process):
        end.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_after_fork)


class Address(NamedTuple):
    """Where a hub listens, the word by which it knows members, and the process it is in."""

    host: str
    port: int
    token: str
    process: str


@dataclass
class Lines:
    """Messages out of a stream of bytes: one JSON object a line."""

    _rest: bytes = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that are complete now.

        Raises:
            ValueError: If the bytes are no messages.
        """
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > CHUNK * 16:
            raise ValueError("a line without end")
        messages = [json.loads(line) for line in whole]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("a line that is no object")
        return messages


def encode(message: dict[str, Any]) -> bytes:
    """One line."""
    return json.dumps(message).encode() + b"\n"


@dataclass
class _Member:
    lines: Lines = field(default_factory=Lines)
    rank: int | None = None
    process: str = ""
    has_left: bool = False


class Hub:
    """Passes the first failure on to all ranks, and tells them when all have failed at the same place.

    Args:
        size: Number of ranks.
        host: Name or address by which all ranks reach this one.
    """

    def __init__(self, size: int, host: str) -> None:
        self._size = size
        self._listener = keep_from_forks(_listen(host))
        self.address = Address(host, self._listener.getsockname()[1], secrets.token_hex(16), this_process())
        self._members: dict[socket.socket, _Member] = {}
        self._failures: dict[int, Failure] = {}
        self._first: Failure | None = None
        self._wake, self._woken = map(keep_from_forks, socket.socketpair())
        self._selector = selectors.DefaultSelector()
        for end in (self._listener, self._woken):
            self._selector.register(end, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="failure-hub", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Let all ranks go: what happens to this process from now on is no failure."""
        self._wake.send(b"x")
        self._thread.join()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                end = key.fileobj
                assert isinstance(end, socket.socket)
                if end is self._woken:
                    return self._close()
                if end is self._listener:
                    self._accept()
                elif end in self._members:
                    self._read(end)

    def _accept(self) -> None:
        with suppress(OSError):
            end, _ = self._listener.accept()
            keep_from_forks(end)
            self._members[end] = _Member()
            self._selector.register(end, selectors.EVENT_READ)

    def _read(self, end: socket.socket) -> None:
        member = self._members[end]
        try:
            data = end.recv(CHUNK)
            for message in member.lines.feed(data):
                self._hear(end, member, message)
        except (OSError, ValueError, TypeError):  # a line that broke, or a stranger
            data = b""
        if not data:
            self._drop(end)

    def _hear(self, end: socket.socket, member: _Member, message: dict[str, Any]) -> None:
        if message.get("token") == self.address.token:
            member.rank, member.process = int(message["rank"]), str(message["process"])
            if self._first is not None:
                _send(end, {"first": asdict(self._first)})
        elif member.rank is None:
            raise ValueError("a stranger")
        elif "failure" in message:
            self._learn(Failure(**message["failure"]))
        member.has_left = member.has_left or "bye" in message

    def _drop(self, end: socket.socket) -> None:
        member = self._members.pop(end)
        self._selector.unregister(end)
        end.close()
        if member.rank is not None and not member.has_left and member.rank not in self._failures:
            self._learn(Failure.vanished(member.rank, member.process))

    def _learn(self, failure: Failure) -> None:
        self._failures[failure.rank] = failure
        if self._first is None:
            self._first = failure
            self._tell({"first": asdict(failure)})
        places = {other.place if other.is_own else "" for other in self._failures.values()}
        if len(self._failures) == self._size and len(places) == 1 and "" not in places:
            self._tell({"together": True})

    def _tell(self, message: dict[str, Any]) -> None:
        for end in self._members:
            _send(end, message)

    def _close(self) -> None:
        self._tell({"bye": True})
        for end in (*self._members, self._listener, self._wake, self._woken):
            end.close()
        self._selector.close()


def _send(end: socket.socket, message: dict[str, Any]) -> None:
    with suppress(OSError):  # whoever is gone is dropped when its end is read
        end.sendall(encode(message))


def _listen(host: str) -> socket.socket:
    """On this machine alone where the job is; else on all addresses, since nobody knows which one the others reach."""
    if host in LOOPBACK:
        return socket.create_server(("127.0.0.1", 0), backlog=128)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
    return socket.create_server(("", 0), backlog=128)
