import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict

import pytest
import torch.distributed as dist

from lightning_hybrid.parallel.failures import hub, watch
from lightning_hybrid.parallel.failures.failure import Failure, is_communication_error
from lightning_hybrid.parallel.failures.hub import Address, Hub, encode
from lightning_hybrid.parallel.failures.watch import Watch


def failure(rank, place="fit 1", is_own=True):
    return Failure(rank, "ArithmeticError", "its message", "its trace", place, is_own)


def wait_for(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.fixture
def job(monkeypatch):
    """Three ranks' watches in this process, and what each would have ended it with."""
    monkeypatch.setattr(watch, "POLL", 0.05)
    threads = threading.active_count()
    center, last_words = Hub(3, "127.0.0.1"), [[], [], []]
    watches = [Watch(rank, end=last_words[rank].append) for rank in range(3)]
    for each in watches:
        each.join(center.address)
    yield center, watches, last_words
    for each in watches:
        each.stop()
    center.stop()
    assert threading.active_count() == threads


def test_all_other_ranks_hear_of_the_first_failure(job):
    _, watches, last_words = job
    watches[1].report(failure(1))
    assert watches[0].first(10) == watches[2].first(10) == failure(1)
    watches[0].report(failure(0))
    assert watches[1].first(0.2) is None
    assert watches[2].first(0) == failure(1)
    assert not any(last_words)


def test_rank_that_does_not_end_by_itself_is_ended_with_the_story_of_the_first(job, monkeypatch):
    _, watches, last_words = job
    monkeypatch.setattr(watch, "GRACE", 0.1)
    monkeypatch.setattr(watch, "LAST_WORDS", 1.0)
    watches[1].report(failure(1))
    assert wait_for(lambda: last_words[0] and last_words[2])
    assert last_words[0][0].startswith(
        "[rank 0] This process is ended: rank 1 failed first: ArithmeticError: its message"
    )
    assert last_words[0][0].endswith("Traceback of rank 1:\nits trace")
    assert not last_words[1]
    assert wait_for(lambda: last_words[1])
    assert "has hung" in last_words[1][0]


def test_rank_that_stops_in_time_is_left_alone(job, monkeypatch):
    _, watches, last_words = job
    monkeypatch.setattr(watch, "GRACE", 0.3)
    watches[1].report(failure(1))
    assert watches[0].first(10)
    for each in watches:
        each.stop()
    time.sleep(0.5)
    assert not any(last_words)


def test_process_that_ends_without_a_word_is_noticed(job):
    center, watches, _ = job
    line = socket.create_connection(center.address[:2])
    line.sendall(encode({"token": center.address.token, "rank": 7, "process": "its process (5 on node)"}))
    line.close()
    found = watches[0].first(10)
    assert (found.rank, found.kind) == (7, "")
    assert found.summary.startswith("rank 7 failed first: its process (5 on node) ended without a word")


def test_process_that_says_goodbye_is_not_missed(job):
    _, watches, _ = job
    watches[2].stop()
    assert watches[0].first(0.3) is None


def test_end_of_rank_0_is_noticed():
    with socket.create_server(("127.0.0.1", 0)) as server:
        member = Watch(1, end=lambda text: None)
        member.join(Address("127.0.0.1", server.getsockname()[1], "", "its process (5 on node)"))
        server.accept()[0].close()
        assert member.first(10) == Failure.vanished(0, "its process (5 on node)")
        member.stop()


@pytest.mark.parametrize(
    ("failures", "together"),
    [
        ([failure(0), failure(1), failure(2)], True),
        ([failure(0), failure(1), failure(2, "fit 2")], False),
        ([failure(0), failure(1), failure(2, is_own=False)], False),
        ([failure(0, ""), failure(1, ""), failure(2, "")], False),
        ([failure(0), failure(1)], False),
    ],
)
def test_only_the_same_place_on_all_ranks_is_together(job, failures, together):
    _, watches, _ = job
    for each in failures:
        watches[each.rank].report(each)
    assert all(each.together(10 if together else 0.2) == together for each in watches)


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\n\r\n", encode({"token": "x", "rank": 1}), b"[1]\n"])
def test_strangers_are_sent_away_and_disturb_nobody(job, words):
    center, watches, _ = job
    with socket.create_connection(center.address[:2]) as stranger:
        stranger.sendall(words + encode({"failure": asdict(failure(1))}))
        stranger.settimeout(10)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    watches[2].report(failure(2))
    assert watches[0].first(10) == failure(2)


def test_hub_that_cannot_be_reached_is_a_warning():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    lonely = Watch(1)
    with pytest.warns(UserWarning, match=f"does not reach rank 0 at 127.0.0.1:{port}"):
        lonely.join(Address("127.0.0.1", port, "", ""))
    assert lonely.first(10) is None
    assert not lonely.together(10)
    lonely.stop()


def test_process_without_its_parent_is_ended(monkeypatch):
    monkeypatch.setattr(watch, "POLL", 0.05)
    said = []
    orphan, child = Watch(1, parent=os.getpid(), end=said.append), Watch(2, parent=os.getppid(), end=said.append)
    assert wait_for(lambda: said)
    assert said == ["[rank 1] This process is ended: the process of rank 0, which started this one, is gone"]
    orphan.stop()
    child.stop()
    assert len(said) == 1


def test_forked_processes_do_not_keep_the_lines_open(job):
    assert (
        len([end for end in hub._of_this_process if end.fileno() != -1]) >= 6
    )  # and those that the hub is about to accept
    pid = os.fork()
    if pid == 0:
        os._exit(any(end.fileno() != -1 for end in hub._of_this_process))
    assert os.waitpid(pid, 0)[1] == 0


def test_errors_of_communication_are_told_from_the_users():
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:1"
    wrapped = ValueError("in a hook")
    wrapped.__cause__ = RuntimeError(gloo)
    assert is_communication_error(RuntimeError(gloo))
    assert is_communication_error(dist.DistBackendError("anything"))
    assert is_communication_error(wrapped)
    assert not is_communication_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_communication_error(ValueError(gloo))


def test_long_texts_are_cut_in_the_middle():
    found = Failure.of(ValueError("a" + "x" * 100_000 + "z"), 3, "")
    assert len(found.message) < 5_000
    assert (found.message[0], found.message[-1]) == ("a", "z")
    assert found.summary.startswith("rank 3 failed first: ValueError: ax")
