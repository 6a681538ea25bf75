"""Runs of real agents of torchrun on one host, which grow with them and go on without one of them."""

import json
import os
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.testing import assert_close

from lightning_hybrid.cli.elastic import main as elastic
from tests import grown
from tests.launch import _context, free_port

SCRIPT = Path(grown.__file__)


def agent(output, arguments):
    """A node: what `lightning-hybrid elastic` does, with workers that are forks of a process that has all modules."""
    os.setsid()
    with open(output, "w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    sys.exit(elastic(arguments))


class Nodes:
    """Agents of one run.

    Args:
        folder: Of the test.
        holds: Nodes that must wait before the run goes on after a step.
    """

    def __init__(self, folder, holds):
        self.folder, self.agents = folder, []
        timeouts = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
        self.arguments = [
            *(f"--dirpath={folder / 'run'}", "--nnodes=1:4", f"--rdzv-endpoint=127.0.0.1:{free_port()}"),
            *(f"--rdzv-conf={timeouts}", "--torchrun=--start-method=fork --run-path"),
            *(str(SCRIPT), str(folder), json.dumps(holds)),
        ]

    def start(self, number):
        for _ in range(number):
            output = self.folder / f"node-{len(self.agents)}"
            process = _context().Process(target=agent, args=(output, self.arguments))
            process.start()
            self.agents.append(process)

    def kill(self, number):
        os.killpg(self.agents[number].pid, signal.SIGKILL)

    def outputs(self):
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("node-*")))

    def until(self, condition, seconds=60):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.outputs()
            time.sleep(0.1)

    def join(self, expected):
        for process in self.agents:
            process.join(90)
        assert [process.exitcode for process in self.agents] == expected, self.outputs()


@contextmanager
def nodes(folder, holds):
    made = Nodes(folder, holds)
    try:
        yield made
    finally:
        for number, process in enumerate(made.agents):
            if process.is_alive():
                made.kill(number)
            process.join()


def runs(folder):
    return (folder / "run" / "elastic.json").exists()


def test_a_run_grows_with_its_nodes_and_has_the_numbers_of_one_process(tmp_path):
    with nodes(tmp_path, {"5": 3}) as made:
        made.start(1)
        made.until(lambda: runs(tmp_path))
        made.start(3)
        made.join([0] * 4)
    print(made.outputs())
    print(sorted(row for path in tmp_path.glob("seen-*") for row in path.read_text().splitlines()))
    assert_close
    torch
