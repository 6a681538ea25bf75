"""Runs of real agents of torchrun on one host, which grow with them and go on without one of them."""

import json
import os
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from lightning_hybrid.cli.elastic import main as elastic
from lightning_hybrid.parallel.elastic import Meeting
from tests import grown
from tests.launch import _context, free_port, run_trainers

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


def seen(folder):
    """Samples by world size, step and epoch, over all replicas."""
    found = {}
    for path in folder.glob("seen-*"):
        for world, step, epoch, numbers in map(json.loads, path.read_text().splitlines()):
            found.setdefault((world, step, epoch), []).extend(numbers)
    return {place: sorted(numbers) for place, numbers in found.items()}


def in_one_process(folder):
    os.environ["GROUP_WORLD_SIZE"] = "1"
    grown.main(folder, {}, max_accumulate=None, max_replicas=None, dirpath=None)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Steps and weights of one process that accumulates the batches, and what each of its steps had."""
    folder = tmp_path_factory.mktemp("expected")
    run_trainers(1, in_one_process, folder)
    rows = {(step, epoch): numbers for (_, step, epoch), numbers in seen(folder).items()}
    for each in range(grown.EPOCHS):
        numbers = [number for (_, epoch), row in rows.items() if epoch == each for number in row]
        assert sorted(numbers) == list(range(grown.SAMPLES))
    _, steps, weights = torch.load(folder / "weights.pt")
    return steps, weights, rows


def check(folder, expected, worlds):
    """The run's last steps of each number, in worlds of these sizes, were those that are expected."""
    steps, weights, rows = expected
    _, found_steps, found = torch.load(folder / "weights.pt")
    assert found_steps == steps == len(worlds)
    assert_close(found, weights, rtol=1e-9, atol=1e-12)
    of_run = seen(folder)
    assert {place: of_run.get((worlds[place[0]], *place)) for place in rows} == rows


def test_a_run_grows_with_its_nodes_and_has_the_numbers_of_one_process(tmp_path, expected):
    with nodes(tmp_path, {"1 of 5": 3}) as made:
        made.start(1)
        made.until(lambda: runs(tmp_path))
        made.start(3)  # one of them waits for the second milestone
        made.join([0] * 4)
        assert "exit code 83" in made.outputs()
    check(tmp_path, expected, [1] * 6 + [2] * 7 + [4] * 7)
    assert Meeting(tmp_path / "run").read().state == "ended"


@pytest.mark.full
def test_nodes_that_cannot_share_the_batch_without_a_lost_one_step_aside(tmp_path, expected):
    with nodes(tmp_path, {"1 of 5": 3, "4 of 15": 9}) as made:
        made.start(1)
        made.until(lambda: runs(tmp_path))
        made.start(3)
        made.until(lambda: any(place[:2] == (4, 15) for place in seen(tmp_path)))
        made.kill(3)
        made.join([0] * 3 + [-signal.SIGKILL])
        assert "the batch cannot be shared by 3 nodes; 2 go on" in made.outputs()
    check(tmp_path, expected, [1] * 6 + [2] * 7 + [2] * 7)


def test_a_run_goes_on_without_a_node_that_is_lost(tmp_path, expected):
    with nodes(tmp_path, {"1 of 5": 1, "2 of 10": 9}) as made:
        made.start(1)
        made.until(lambda: runs(tmp_path))
        made.start(1)
        made.until(lambda: any(place[:2] == (2, 10) for place in seen(tmp_path)))
        made.kill(1)
        made.join([0, -signal.SIGKILL])
    check(tmp_path, expected, [1] * 6 + [2] * 2 + [1] * 12)  # from the checkpoint of step 8 on
