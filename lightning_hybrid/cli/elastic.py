"""``lightning-hybrid elastic``: start torchrun's agent on a node of a run that grows with its nodes.

A thin layer over ``torch.distributed.run``: it chooses what an elastic run needs, and lets a node that comes while the
run goes on wait until the run invites it, since an agent that joins makes all others restart at once.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException

from lightning_hybrid.parallel.elastic import NODE, STALE, Meeting, RunState

PORT = 29400  # torchrun's own
POLL = 1.0  # seconds between looks at the folder
CONF = {"last_call_timeout": "15", "keep_alive_interval": "5", "keep_alive_max_attempt": "3"}  # seconds, seconds, times


def main(argv: list[str]) -> int:
    """Run the command.

    Args:
        argv: Arguments behind ``lightning-hybrid elastic``.

    Returns:
        Exit status: 0 when the run has ended, 1 if it has vanished while this node waited, 2 if the folder is of
        another run, or cannot be written to. torchrun's error, with status 1, leaves it as an exception. Arguments that
        cannot work end the process with status 2, as argparse does.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        host, port = _endpoint(args.rdzv_endpoint)
        arguments = [] if args.store else _arguments(args)
    except ValueError as error:
        parser.error(str(error))
    if args.store:
        return _keep_store(host, port)
    if args.dirpath is None or args.script is None:
        parser.error("--dirpath and a script are needed, but with --store.")
    return _run(Meeting(args.dirpath), args.rdzv_id, host, port, arguments)


def _run(meeting: Meeting, run: str, host: str, port: int, arguments: list[str]) -> int:
    """Wait, and be torchrun's agent, as often as this node is sent outside."""
    name, own = f"{socket.gethostname()}-{os.getpid()}", f"{run} at {host}:{port}"
    problem = _problem(meeting, own)
    if problem:
        _say(problem)
        return 2
    # A store that agents keep over several starts has keys of the last one, and an address of a node that may be gone.
    os.environ |= {NODE: name, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    has_waited, stores = False, list[TCPStore]()
    while True:
        outcome = _wait_outside(meeting, run, name, host, port, has_waited=has_waited)
        if outcome is not None:
            return outcome
        if not stores and _is_here(host) and not _listens(host, port):  # it stays where it is when this node waits
            stores.append(_store(host, port))
        try:
            with _taking_part(meeting, name, own):
                torchrun.main(arguments)
        except SignalException:
            if name not in meeting.waiting():
                raise
            has_waited = True  # sent outside by its own process
        else:
            return 0


def _problem(meeting: Meeting, own: str) -> str:
    """Why a node cannot be part of a run in this folder; nothing if it can."""
    try:
        (meeting.folder / meeting.mark()).unlink()
        others = {run for run, _ in meeting.running().values()} - {own}
    except OSError as error:
        return f"cannot write to --dirpath={meeting.folder}: {error}"
    if others:
        return (
            f"--dirpath={meeting.folder} is of a run that goes on, or was lost less than {STALE:g} seconds ago: "
            f"{', '.join(sorted(others))}. This one is {own}. Give all nodes of a run the same --rdzv-id and "
            "--rdzv-endpoint, and another run a folder of its own."
        )
    return ""


@contextmanager
def _taking_part(meeting: Meeting, name: str, run: str) -> Iterator[None]:
    """Context in which this node says again and again that it is part of a run."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(POLL):
            with suppress(OSError):
                meeting.take_part(name, run)

    meeting.take_part(name, run)
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        meeting.leave(name)


def next_step(state: RunState | None, run: str, name: str, *, is_alive: bool, has_waited: bool) -> str:
    """What a node does.

    Args:
        state: What the run says of itself.
        run: The job's id.
        name: Of the node.
        is_alive: Whether nodes say that they are part of it, and somebody listens at the rendezvous endpoint.
        has_waited: Whether the node has waited for this run.

    Returns:
        "start", "wait", "ended" or "gone".
    """
    if state is None or state.run != run:  # no run yet
        return "start"
    if state.state == "ended":
        return "ended"
    if not is_alive:
        return "gone" if has_waited else "start"
    return "start" if name in state.invited else "wait"


def _wait_outside(meeting: Meeting, run: str, name: str, host: str, port: int, *, has_waited: bool) -> int | None:
    """Wait until this node may join; the exit status if it need not any more.

    Args:
        meeting: Where the run tells of itself.
        run: The job's id.
        name: Of the node.
        host: Where the rendezvous is.
        port: Its port.
        has_waited: Whether it has been part of the run.
    """
    heard, step, before = 0.0, "wait", signal.signal(signal.SIGTERM, _end)
    try:
        while step == "wait":
            state, running = meeting.read(), meeting.running()
            last = max((sign for _, sign in running.values()), default=0.0)
            has_waited = has_waited or 0 < heard < last  # a sign that is new: the run is not what a lost one has left
            is_alive = bool(running) and _listens(host, port)
            step = next_step(state, run, name, is_alive=is_alive, has_waited=has_waited)
            if step == "wait":
                meeting.wait_outside(name)
                if not heard and state is not None:
                    _say(f"{name} waits: the run has {state.nodes} nodes, and takes others in when its batch grows.")
                heard = heard or last
                time.sleep(POLL)
    finally:
        signal.signal(signal.SIGTERM, before)
        meeting.go([name])
    if step == "start":
        if state is not None and not has_waited:
            meeting.forget()  # what a run has left that is gone
        _say(f"{name} joins.")
        return None
    ended = (
        f"has ended. To go on from its newest checkpoint, as with more epochs, give another --rdzv-id than {run!r}; to "
        f"begin another run, another --dirpath than {meeting.folder}"
    )
    _say(f"{name} leaves: the run {ended if step == 'ended' else 'is gone'}.")
    return int(step == "gone")


def _end(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=5):
            return True
    except OSError:
        return False


def _is_here(host: str) -> bool:
    """Whether a name is one of this machine's, whose addresses alone can be bound."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
    return False


def _store(host: str, port: int) -> TCPStore:
    wait = timedelta(minutes=1)
    return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=wait, multi_tenant=True)


def _keep_store(host: str, port: int) -> int:
    """Be the rendezvous' store until this process is ended."""
    store = _store(host, port)
    _say(f"The store of the rendezvous is at {host}:{store.port}, until this process ends.")
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        return 0


def _arguments(args: argparse.Namespace) -> list[str]:
    """Those of torchrun.

    Raises:
        ValueError: If one cannot work.
    """
    given = dict(_pair(each) for each in args.rdzv_conf.split(",") if each)
    if args.max_restarts < 1:
        raise ValueError(f"--max-restarts={args.max_restarts}: each milestone and each failure needs one.")
    found = {
        "nnodes": args.nnodes,
        "nproc-per-node": args.nproc_per_node,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": args.rdzv_endpoint,
        "rdzv-id": args.rdzv_id,
        "rdzv-conf": ",".join(f"{name}={value}" for name, value in {**CONF, **given}.items()),
        "max-restarts": args.max_restarts,
    }
    if args.local_addr is not None:
        found["local-addr"] = args.local_addr
    options = [f"--{name}={value}" for name, value in found.items()]
    return [*options, *shlex.split(args.torchrun), *(["-m"] if args.module else []), str(args.script), *args.arguments]


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise ValueError(f"--rdzv-conf: {text!r} is no name=value.")
    return name.strip(), value.strip()


def _endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":") if ":" in text else (text, "", str(PORT))
    if not host or not port.isdecimal() or port == "0":
        raise ValueError(f"--rdzv-endpoint={text!r} is no HOST:PORT that all nodes can reach.")
    return host, int(port)


def _say(text: str) -> None:
    print(f"lightning-hybrid elastic: {text}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-hybrid elastic",
        description="Start torchrun's agent on a node of a run that grows with its nodes. The same command on each.",
    )
    add = parser.add_argument
    add("--dirpath", type=Path, metavar="DIR", help="folder that all nodes share, as BatchSizeGrowth has it")
    add("--nnodes", default="1:4", metavar="MIN:MAX", help="nodes (default: %(default)s)")
    add("--nproc-per-node", default="1", metavar="N", help="processes of each node (default: %(default)s)")
    add("--rdzv-endpoint", required=True, metavar="HOST:PORT", help="where the nodes meet; one of them, or a --store")
    add("--rdzv-id", default="elastic", metavar="ID", help="of the job (default: %(default)s)")
    conf = ",".join(f"{name}={value}" for name, value in CONF.items())
    add("--rdzv-conf", default="", metavar="NAME=VALUE,...", help=f"of the rendezvous (default: {conf})")
    add("--max-restarts", type=int, default=10, metavar="N", help="milestones and failures (default: %(default)s)")
    add("--local-addr", metavar="HOST", help="address of this node, if it cannot be found")
    add("--torchrun", default="", metavar="OPTIONS", help="more of torchrun's, in quotes: --torchrun='--tee=3'")
    add("--store", action="store_true", help="start no agent: keep the store that the nodes meet at")
    add("-m", "--module", action="store_true", help="the script is a module, as with python -m")
    add("script", nargs="?", help="the script, and behind it its arguments")
    add("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser
