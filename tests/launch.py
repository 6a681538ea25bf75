"""Run a function on several ranks of a gloo group, from one preloaded fork server.

Starting a rank is a fork of a process that has imported the heavy modules: about 0.1 s instead of some 8 s. The ranks
meet through a store of the caller's, at a port that nobody else has; one in a file looks for news every 10 ms, for each
group that is made. A rank that raises, dies or hangs ends all of them and is named in the error.
"""

import faulthandler
import io
import multiprocessing
import os
import signal
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from multiprocessing import connection, forkserver
from pathlib import Path
from random import SystemRandom
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

PRELOAD = [
    "torch",
    "torch.distributed.tensor",
    "lightning.pytorch",
    "lightning_hybrid",
    "lightning_hybrid.callbacks",
    "lightning_hybrid.experts",
    "lightning_hybrid.precision",
    "hypothesis",
    "pytest",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.t5.modeling_t5",
    "transformers.models.vit.modeling_vit",
    "tests.frozen",  # the last
]
GRACE = 0.3  # seconds in which a rank that died silently is found after another one complained about it


def run_ranks(size: int, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """Call ``function(*args)`` on every rank of a group of ``size`` processes and return the results in rank order.

    Args:
        size: Number of ranks.
        function: A function of a module's top level; it finds ``torch.distributed`` ready.
        args: Its arguments, picklable; tensors are copied.
        timeout: Seconds until ranks that are not done count as stuck.

    Raises:
        RuntimeError: If a rank raised (its traceback is the message) or died without a word.
        TimeoutError: If ranks are stuck; the message says where.
    """
    return _run(size, function, args, timeout, lambda rank: {})


def run_trainers(size: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """As ``run_ranks``, in the environment of torchrun: a Lightning Trainer with ``devices=size`` joins the group."""
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),  # for code that leaves our group and makes another
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "tests",
    }
    return _run(size, function, args, timeout, lambda rank: shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})


class _Job(NamedTuple):
    """What a rank is told."""

    rank: int
    size: int
    folder: str
    port: int
    timeout: float
    environment: dict[str, str]
    filters: list[tuple[Any, ...]]
    start_method: str
    function: Callable[..., Any]
    args: bytes


def _run(
    size: int,
    function: Callable[..., Any],
    args: Sequence[Any],
    timeout: float,
    environment: Callable[[int], dict[str, str]],
) -> list[Any]:
    context = _context()
    filters, method = [_plain(entry) for entry in warnings.filters], multiprocessing.get_start_method()
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # kept until all ranks have ended
        job = _Job(0, size, folder, store.port, timeout, {}, filters, method, function, _pack(args))
        ranks: list[_Rank] = []
        try:
            for number in range(size):
                variables = {**os.environ, **environment(number)}
                ranks.append(_Rank(context, job._replace(rank=number, environment=variables)))
            results = _collect(ranks, time.monotonic() + timeout)
            for rank in ranks:
                rank.pipe.send("go")  # not before: none closes a connection that a peer still needs
            for rank in ranks:
                rank.join()
        finally:
            for rank in ranks:
                rank.kill()
    return results


@cache
def _context() -> Any:
    multiprocessing.set_forkserver_preload(PRELOAD)
    root = str(Path(__file__).parents[1])
    with patch.dict(os.environ, {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}):
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


class _Rank:
    """The parent's end of one rank."""

    def __init__(self, context: Any, job: _Job) -> None:
        self.name, self.dump = f"rank {job.rank} of {job.size}", Path(job.folder, f"stack-{job.rank}")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_rank_main, args=(theirs, job), name=self.name)
        self.process.start()
        theirs.close()

    def receive(self) -> tuple[bool, Any]:
        """Whether the rank succeeded, and its result or what went wrong."""
        try:
            succeeded, packed = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(GRACE)
            return False, f"{self.name} died without a word, exit code {self.process.exitcode}"
        return (True, _unpack(packed)) if succeeded else (False, f"{self.name} failed\n{packed}")

    def stack(self) -> str:
        """Where a stuck rank is, by the signal that faulthandler waits for."""
        os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(GRACE)
        return f"{self.name} is stuck\n{self.dump.read_text() if self.dump.exists() else 'before it started'}"

    def join(self) -> None:
        self.process.join(30)
        if self.process.exitcode != 0:
            raise RuntimeError(f"{self.name} returned, but ended with exit code {self.process.exitcode}")

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()


def _collect(ranks: list[_Rank], deadline: float) -> list[Any]:
    results: dict[_Rank, Any] = {}
    while pending := {rank.pipe: rank for rank in ranks if rank not in results}:
        ready = connection.wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError("\n".join(rank.stack() for rank in pending.values()))
        for pipe in ready:
            succeeded, result = pending[pipe].receive()
            if not succeeded:
                raise RuntimeError(_cause(result, [rank for rank in pending.values() if rank.pipe is not pipe]))
            results[pending[pipe]] = result
    return [results[rank] for rank in ranks]


def _cause(failure: str, others: list[_Rank]) -> str:
    """The failure that came first, after the silent deaths that may have caused it."""
    time.sleep(GRACE)
    return "\n".join([*(rank.receive()[1] for rank in others if rank.process.exitcode is not None), failure])


def _rank_main(pipe: connection.Connection, job: _Job) -> None:
    with open(Path(job.folder, f"stack-{job.rank}"), "w") as dump:
        faulthandler.register(signal.SIGUSR1, dump)
        try:
            pipe.send((True, _pack(_call(job))))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        pipe.poll(job.timeout)  # until every rank is done, or the parent is gone
        if dist.is_initialized():
            dist.destroy_process_group()


def _call(job: _Job) -> Any:
    os.environ.clear()
    os.environ.update(job.environment, OMP_NUM_THREADS="1")
    multiprocessing.set_start_method(
        job.start_method, force=True
    )  # else loader workers come from a server of their own
    torch.set_num_threads(1)
    warnings.resetwarnings()
    for entry in reversed(job.filters):
        warnings.filterwarnings(*entry)
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("127.0.0.1", job.port),
        rank=job.rank,
        world_size=job.size,
        timeout=timedelta(seconds=2 * job.timeout),  # ours comes first, and tells more
    )
    return job.function(*_unpack(job.args))


def _plain(entry: tuple[Any, ...]) -> tuple[Any, ...]:
    """An entry of ``warnings.filters`` as arguments of ``warnings.filterwarnings``."""
    action, message, category, module, line = entry
    return action, getattr(message, "pattern", message) or "", category, getattr(module, "pattern", module) or "", line


def _pack(value: Any) -> bytes:
    """Bytes instead of torch's shared memory, whose file descriptors outlive the test."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed), weights_only=False)


def free_port() -> int:
    """A port that nobody has, and that the system gives nobody before it is taken: it gives higher ones."""
    while True:
        port = SystemRandom().randrange(15_000, 32_000)  # not the tests' seed, which their other processes have too
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
