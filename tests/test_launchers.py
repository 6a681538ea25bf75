"""Processes as users start them: by Lightning's own launcher, by torchrun, by two agents of torchrun on one host."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch import free_port

ROOT = Path(__file__).parents[1]


def start(*arguments, module=None):
    python = [sys.executable, "-W", "ignore", *(["-m", module] if module else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return subprocess.Popen(
        [*python, *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def output_of(process, timeout=120):
    try:
        return process.communicate(timeout=timeout)[0]
    finally:
        process.kill()


def is_gone(session, seconds=20):
    """Whether no process of a session is left, soon."""
    for _ in range(10 * seconds):
        try:
            os.killpg(session, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def losses(*outputs):
    """Loss by rank; lines of several ranks may run into one another."""
    rows = [json.loads(row) for output in outputs for row in re.findall(r"\{\"rank\".*?\}", output)]
    return {row["rank"]: row["loss"] for row in rows}


def test_lightnings_launcher_torchrun_and_two_agents_train_alike():
    own = start(2, 1, module="tests.launched")
    expected = losses(output_of(own))
    assert own.returncode == 0
    assert sorted(expected) == [0, 1]
    assert expected[0] == expected[1]
    run, script = "torch.distributed.run", ["-m", "tests.launched"]
    torchrun = start("--nproc_per_node=2", f"--master_port={free_port()}", *script, 2, 1, module=run)
    assert losses(output_of(torchrun)) == expected
    shared = ["--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    agents = [start(*shared, f"--node_rank={node}", *script, 1, 2, module=run) for node in range(2)]
    assert losses(*(output_of(agent) for agent in agents)) == expected


@pytest.mark.parametrize("failing", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_rank_that_fails_ends_the_job_with_its_own_message(failing):
    process = start(2, 1, failing, module="tests.launched")
    output = output_of(process)
    assert process.returncode != 0
    assert is_gone(process.pid)
    assert "ArithmeticError: the message of the rank that failed" in output
