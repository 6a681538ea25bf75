import json

import pytest

from lightning_hybrid.functional.drawing import chrome_trace, text_grid, timeline_png
from lightning_hybrid.functional.lowering import lower
from lightning_hybrid.functional.schedules import Action, Kind, choose, gpipe
from lightning_hybrid.functional.simulation import simulate

F, B = Kind.FORWARD, Kind.BACKWARD
MEASURED = [  # seconds since an origin that means nothing, by two ranks, one transfer
    (0, Action(F, 0, 0), 100.0, 100.25),
    (0, Action(Kind.SEND_FORWARD, 0, 0), 100.25, 100.5),
    (1, Action(F, 1, 0), 100.5, 100.75),
    (1, Action(B, 1, 0), 100.75, 101.3),
    (0, Action(B, 0, 0), 101.3, 101.8),
]


def events(name, p, m, v=1, **times):
    return simulate(lower(choose(name, p, m, v), p * v), **times).events


def test_text_shows_forward_backward_and_idle_slots():
    assert text_grid(events("1f1b", 2, 2)).splitlines() == [
        "rank 0 | F0 F1 .  .  B0 =  .  B1 =",  # the second backward waits for the other rank
        "rank 1 | .  F0 B0 =  F1 B1 =  .  .",
    ]


def test_text_shows_chunks_as_letters():
    assert text_grid(events("interleaved_1f1b", 2, 2, 2, backward_time=1.0)).splitlines() == [
        "rank 0 | F0a F1a F0b F1b .   B0b .   B1b B0a B1a",
        "rank 1 | .   F0a F1a F0b B0b F1b B1b B0a B1a .",
    ]


def test_long_text_goes_on_below():
    whole = text_grid(events("1f1b", 2, 6)).splitlines()
    blocks = [block.splitlines() for block in text_grid(events("1f1b", 2, 6), width=40).split("\n\n")]
    assert max(len(line) for block in blocks for line in block) <= 40
    assert len(blocks) == 3
    for rank in range(2):
        assert "".join(block[rank].split("|")[1] for block in blocks).split() == whole[rank].split("|")[1].split()


def test_text_rounds_measured_times_to_slots_and_starts_at_the_first():
    assert text_grid(MEASURED).splitlines() == ["rank 0 | F0 .  .  .  .  B0 =", "rank 1 | .  .  F0 B0 =  .  ."]
    assert text_grid(MEASURED, slot=0.9).splitlines() == ["rank 0 | F0 B0", "rank 1 | .  B0"]


def test_text_of_one_tiny_action_stays_of_bounded_width():
    long = text_grid([(0, Action(F, 0, 0), 0.0, 1e-9), (0, Action(B, 0, 0), 1.0, 2.0)])
    assert 1000 <= len(long.split("|")[1].split()) <= 1001


@pytest.mark.parametrize("nothing", [[], [(0, Action(F, 0, 0), 1.0, 1.0)], [MEASURED[1]]])
@pytest.mark.parametrize("draw", [text_grid, lambda events: timeline_png(events, "never_written.png")])
def test_events_without_time_are_refused(draw, nothing):
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(nothing)


def test_a_slot_without_time_is_refused():
    with pytest.raises(ValueError, match="slot=0"):
        text_grid(MEASURED, slot=0)


def test_chrome_trace_has_a_process_a_rank_and_microseconds():
    trace = json.loads(json.dumps(chrome_trace(MEASURED)))["traceEvents"]
    assert {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"} == {
        0: "pipeline rank 0",
        1: "pipeline rank 1",
    }
    spans = [e for e in trace if e["ph"] == "X"]
    assert [(e["pid"], e["tid"], e["name"]) for e in spans] == [
        (0, 0, "forward 0"),
        (0, 1, "send_forward 0"),
        (1, 0, "forward 0"),
        (1, 0, "backward 0"),
        (0, 0, "backward 0"),
    ]
    assert [e["dur"] for e in spans] == pytest.approx([250e3, 250e3, 250e3, 550e3, 500e3])
    assert spans[0]["ts"] == 100e6


def test_chrome_trace_tells_stage_and_chunk():
    spans = [e for e in chrome_trace(events("auto", 2, 2, 3))["traceEvents"] if e["ph"] == "X"]
    assert {(e["args"]["stage"], e["args"]["chunk"]) for e in spans} == {(s, s // 2) for s in range(6)}


@pytest.mark.parametrize("drawn", [MEASURED, events("auto", 4, 8, 2), simulate(gpipe(1, 2)).events])
def test_timeline_is_a_png_of_simulated_and_of_measured_events(drawn, tmp_path):
    path = tmp_path / "timeline.png"
    timeline_png(drawn, path, title="a step", unit="s")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    assert width > height > 100
