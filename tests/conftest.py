"""Hygiene: a test that leaves something behind fails, and what it left is taken away before the next one starts.

A child process that a test left is named, not ended.
"""

import gc
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

settings.register_profile("fixed", deadline=None, derandomize=True)  # a busy machine fails no test, nor does luck
settings.load_profile("fixed")

torch.set_num_threads(1)  # as in the ranks: several would spin where the cores are busy, and sum in another order

UNAVOIDABLE = {  # environment variables that are put back without a word
    "PL_GLOBAL_SEED",  # these two by every seed_everything, which LightningCLI calls by itself
    "PL_SEED_WORKERS",
    "PYTEST_CURRENT_TEST",  # by pytest, anew for each phase of a test
    "TORCHINDUCTOR_CACHE_DIR",  # by the first import of torch's compiler
}
SERVERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")  # live as long as pytest does

SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {  # how to read each, and how to set it back
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, lambda device: torch.set_default_device(None)),
    "gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "anomaly detection": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "deterministic mode": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "cudnn.deterministic": (
        lambda: torch.backends.cudnn.deterministic,
        lambda value: setattr(torch.backends.cudnn, "deterministic", value),
    ),
    "cudnn.benchmark": (
        lambda: torch.backends.cudnn.benchmark,
        lambda value: setattr(torch.backends.cudnn, "benchmark", value),
    ),
}


def pytest_collection_finish() -> None:
    """Objects of thousands of tests and of libraries: no later collection, and no probe, shall go through them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_numbers_in_any_order() -> None:
    torch.default_generator.manual_seed(0)  # that of torch formats a stack for devices that are not there yet


@pytest.fixture(autouse=True, scope="module")
def fixtures_leave_nothing_behind() -> Iterator[None]:
    """Fixtures of a whole file run before the watch over its first test begins."""
    yield from _watch()


@pytest.fixture(autouse=True)
def leaves_nothing_behind(fixtures_leave_nothing_behind: None) -> Iterator[None]:
    yield from _watch()


def _watch() -> Iterator[None]:
    environment, folder, names = dict(os.environ), os.getcwd(), _names(os.getcwd())
    settings = {name: read() for name, (read, _) in SETTINGS.items()}
    children, threads = _children(), set(threading.enumerate())
    yield
    leaks = [
        *_leaked_group(),
        *_changed_settings(settings),
        *_changed_environment(environment),
        *(f"child process: {command}" for pid, command in _children().items() if pid not in children),
        *_left_threads(threads),
        *(f"file in the working folder: {name}" for name in sorted(_names(folder) - names)),
    ]
    os.chdir(folder)
    assert not leaks, "left behind\n  " + "\n  ".join(leaks)


def _leaked_group() -> Iterator[str]:
    if dist.is_initialized():
        dist.destroy_process_group()
        yield "an initialised process group"


def _changed_settings(before: dict[str, Any]) -> Iterator[str]:
    for name, (read, write) in SETTINGS.items():
        if read() != before[name]:
            yield f"{name}: {read()} instead of {before[name]}"
            write(before[name])


def _changed_environment(before: dict[str, str]) -> list[str]:
    names = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
    for name in names:
        os.environ.pop(name, None)
        os.environ.update({name: before[name]} if name in before else {})
    return [f"environment variable {name}" for name in sorted(names - UNAVOIDABLE)]


def _children() -> dict[int, str]:
    """Command lines of the living child processes; on systems without /proc those of multiprocessing alone."""
    multiprocessing.active_children()  # collects the dead
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        return {child.pid or 0: child.name for child in multiprocessing.active_children()}
    pids = {int(pid) for task in tasks.iterdir() for pid in _read(task / "children").split()}
    commands = {pid: _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip() for pid in pids}
    return {pid: line for pid, line in commands.items() if line and not any(server in line for server in SERVERS)}


def _left_threads(before: set[threading.Thread]) -> Iterator[str]:
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon:
            thread.join(2)
            if thread.is_alive():
                yield f"thread: {thread.name}"


def _names(folder: str) -> set[str]:
    return {name for name in os.listdir(folder) if not name.startswith((".", "__pycache__"))}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it ended meanwhile
        return ""
