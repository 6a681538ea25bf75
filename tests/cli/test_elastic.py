"""What a node does that comes to a run, and what torchrun's agent is started with."""

import os

import pytest
from torch.distributed import run as torchrun

from lightning_hybrid.cli import elastic
from lightning_hybrid.parallel.elastic import NODE, Meeting, RunState

RUNNING, LEAVING, ENDED = (RunState("job", state, invited=("a",)) for state in ("running", "leaving", "ended"))


@pytest.mark.parametrize(
    ("state", "name", "is_alive", "has_waited", "expected"),
    [
        (None, "b", False, False, "start"),
        (RUNNING, "b", True, False, "wait"),
        (LEAVING, "b", True, True, "wait"),
        (LEAVING, "a", True, True, "start"),
        (ENDED, "b", True, True, "ended"),
        (ENDED, "b", False, True, "ended"),
        (ENDED, "b", False, False, "ended"),
        (RUNNING, "b", False, True, "gone"),
        (RUNNING, "b", False, False, "start"),  # what another run has left
        (RunState("another job", "running"), "b", True, False, "start"),
    ],
)
def test_a_node_waits_until_it_is_invited(state, name, is_alive, has_waited, expected):
    assert elastic.next_step(state, "job", name, is_alive=is_alive, has_waited=has_waited) == expected


def test_torchruns_agent_gets_what_an_elastic_run_needs(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(torchrun, "main", found.append)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0")
    monkeypatch.setenv(NODE, "")
    Meeting(tmp_path).write(RunState("job", "running"))
    options = ["--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=job", "--nnodes=2:8", "--rdzv-conf=last_call_timeout=40"]
    assert (
        elastic.main([f"--dirpath={tmp_path}", *options, "--torchrun=--tee=3", "-m", "package.script", "--rate", "1"])
        == 0
    )
    args = torchrun.parse_args(found[0])
    assert (args.nnodes, args.rdzv_backend, args.rdzv_id, args.max_restarts) == ("2:8", "c10d", "job", 10)
    assert args.rdzv_conf == "last_call_timeout=40,keep_alive_interval=5,keep_alive_max_attempt=3"
    assert (args.tee, args.module, args.training_script) == ("3", True, "package.script")
    assert args.training_script_args == ["--rate", "1"]
    assert os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert Meeting(tmp_path).read() is None  # nobody listens: that run is gone


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rdzv-endpoint=localhost:0", "--dirpath=x", "y.py"], "no HOST:PORT that all nodes can reach"),
        (["--rdzv-endpoint=localhost", "--dirpath=x", "--max-restarts=0", "y.py"], "each milestone and each failure"),
        (["--rdzv-endpoint=localhost", "--dirpath=x", "--rdzv-conf=a", "y.py"], "'a' is no name=value"),
        (["--rdzv-endpoint=localhost", "y.py"], "--dirpath and a script are needed"),
    ],
)
def test_wrong_arguments_are_told(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        elastic.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_nodes_that_gave_no_sign_for_long_do_not_wait_any_more(tmp_path):
    meeting = Meeting(tmp_path / "folder")
    assert meeting.waiting() == []
    for name in ("b", "a", "late"):
        meeting.wait_outside(name)
    path = tmp_path / "folder" / "elastic-waiting" / "late"
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 60))
    assert meeting.waiting() == ["a", "b"]
    meeting.go(["a", "unknown"])
    assert meeting.waiting() == ["b"]
