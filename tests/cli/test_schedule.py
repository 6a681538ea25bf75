import json

import pytest

from lightning_hybrid.cli.schedule import main


def run(line):
    return main(line.split())


def test_the_documented_command_tells_bubble_end_and_peak(capsys):
    assert run("--pipeline 4 --micro-batches 8 --chunks 2 --schedule interleaved --width 400") == 0
    out = capsys.readouterr().out
    assert "end time:                  28.5\n" in out
    assert f"{3 / 19:.4f} simulated, {3 / 19:.4f} with equal stages" in out
    assert f"{3 / 16:.4f} simulated, {3 / 16:.4f} with equal stages" in out
    assert "[11, 9, 7, 5] micro-batches of a chunk\n" in out
    assert out.startswith("rank 0 | F0a F1a F2a F3a F0b ")
    assert "order:" not in out


def test_defaults_are_1f1b_of_four_ranks(capsys):
    assert run("") == 0
    out = capsys.readouterr().out
    assert "end time:                  33\n" in out
    assert "[4, 3, 2, 1] micro-batches\n" in out


def test_transfers_make_the_simulated_bubble_larger_than_theory(capsys):
    run("--pipeline 2 --micro-batches 1 --forward-time 2 --backward-time 3 --transfer-time 0.5")
    out = capsys.readouterr().out
    assert "end time:                  11\n" in out
    assert f"{12 / 22:.4f} simulated, 0.5000 with equal stages" in out


def test_the_fallback_to_gpipes_order_is_said(capsys):
    run("--pipeline 4 --micro-batches 6 --chunks 2")
    assert "order: GPipe's, since 6 micro-batches are no multiple of 4 ranks\n" in capsys.readouterr().out


def test_pictures_are_written(tmp_path):
    png, trace = tmp_path / "out.png", tmp_path / "out.json"
    main(["--png", str(png), "--trace", str(trace)])
    assert png.read_bytes().startswith(b"\x89PNG")
    assert len([e for e in json.loads(trace.read_text())["traceEvents"] if e.get("cat") == "forward"]) == 4 * 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--pipeline 0", "pipeline ranks is 0"),
        ("--chunks 0", "chunks a rank is 0"),
        ("--chunks 2 --schedule 1f1b", "runs one chunk a rank, got 2"),
        ("--schedule zigzag", "invalid choice: 'zigzag'"),
        ("--forward-time -1", "forward_time=-1"),
        ("--forward-time 0 --backward-time 0", "nothing to draw"),
    ],
)
def test_arguments_that_cannot_work_end_with_status_two_and_a_reason(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
