"""What a node does that comes to a run, and what torchrun's agent is started with."""

import os
import signal

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


ENDPOINT = "--rdzv-endpoint=127.0.0.1:1"


@pytest.fixture
def environment(monkeypatch):
    for name in (NODE, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        monkeypatch.setenv(name, "")


def test_a_folder_of_another_run_is_refused(tmp_path, capsys, monkeypatch, environment):
    monkeypatch.setattr(torchrun, "main", lambda arguments: None)
    meeting, arguments = Meeting(tmp_path), [f"--dirpath={tmp_path}", ENDPOINT, "--rdzv-id=job", "script.py"]
    meeting.take_part("a", "job at 127.0.0.1:1")
    assert elastic.main(arguments) == 0
    meeting.take_part("b", "sweep-2 at head:29400")
    assert elastic.main(arguments) == 2
    assert "sweep-2 at head:29400. This one is job at 127.0.0.1:1." in capsys.readouterr().out
    silent = tmp_path / "elastic-running" / "b"
    os.utime(silent, (silent.stat().st_atime, silent.stat().st_mtime - 60))
    assert elastic.main(arguments) == 0
    (tmp_path / "file").touch()
    assert elastic.main([f"--dirpath={tmp_path}/file/run", *arguments[1:]]) == 2
    assert f"cannot write to --dirpath={tmp_path}/file/run" in capsys.readouterr().out


def test_a_node_takes_part_as_long_as_its_agent_lives(tmp_path, monkeypatch, environment):
    found = []
    monkeypatch.setattr(torchrun, "main", lambda arguments: found.extend(Meeting(tmp_path).running().values()))
    assert elastic.main([f"--dirpath={tmp_path}", ENDPOINT, "--rdzv-id=job", "script.py"]) == 0
    assert [run for run, _ in found] == ["job at 127.0.0.1:1"]
    assert Meeting(tmp_path).running() == {}


@pytest.mark.parametrize(("lives", "outcome"), [(True, 1), (False, None)])
def test_a_node_tells_a_run_that_it_waited_for_from_what_a_lost_one_left(lives, outcome, tmp_path, monkeypatch):
    meeting, looks = Meeting(tmp_path), []
    meeting.write(RunState("job", "running"))
    meeting.take_part("a", "job")

    def pause(seconds):
        looks.append(seconds)
        path = tmp_path / "elastic-running" / "a"
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime + lives))

    monkeypatch.setattr(elastic.time, "sleep", pause)
    monkeypatch.setattr(elastic, "_listens", lambda host, port: len(looks) < 3)
    found = elastic._wait_outside(meeting, "job", "b", "127.0.0.1", 1, has_waited=False)
    assert (found, meeting.waiting(), meeting.read() is None) == (outcome, [], not lives)


def test_a_node_that_is_stopped_waits_no_more(tmp_path, monkeypatch):
    meeting = Meeting(tmp_path)
    meeting.write(RunState("job", "running"))
    meeting.take_part("a", "job")
    monkeypatch.setattr(elastic.time, "sleep", lambda seconds: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(elastic, "_listens", lambda host, port: True)
    with pytest.raises(SystemExit) as ended:
        elastic._wait_outside(meeting, "job", "b", "127.0.0.1", 1, has_waited=False)
    assert (ended.value.code, meeting.waiting()) == (143, [])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
