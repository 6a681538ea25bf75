import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.parallel.ledgers.live import LiveBytes, bytes_of, key_of


def test_a_storage_counts_once_for_all_views_where_it_is_wanted_whole():
    live, x = LiveBytes(), torch.zeros(10, dtype=torch.float64)
    releases = [live.add(view, owner, whole=True) for view, owner in ((x[:2], "a"), (x[5:], "b"), (x, "c"))]
    assert (live.total, live.at_peak) == (80, {"a": 80})
    releases[0]()
    releases[1]()
    assert live.total == 80
    releases[2]()
    assert (live.total, live.peak) == (0, 80)


def test_parts_of_one_buffer_count_for_themselves():
    live, x = LiveBytes(), torch.zeros(10)
    for part, owner in ((x[:4], "a"), (x[4:], "b"), (x[:4], "b")):
        live.add(part, owner)
    assert live.at_peak == {"a": 16, "b": 24}


def test_what_is_freed_does_not_count_in_a_later_peak():
    live = LiveBytes()
    x = torch.zeros(10)
    live.add(x, "a")
    del x
    y = torch.zeros(5)
    live.add(y, "b")
    live.start()
    assert (live.total, live.peak, live.at_peak) == (20, 20, {"b": 20})
    z = torch.zeros(3)
    live.add(z, "b")
    assert (live.peak, live.at_peak) == (32, {"b": 32})


def test_the_owners_at_the_peak_are_remembered():
    live = LiveBytes()
    kept = [torch.zeros(2), torch.zeros(3), torch.zeros(1)]
    first = live.add(kept[0], "a")
    live.add(kept[1], "b")
    first()
    live.add(kept[2], "c")
    assert (live.peak, live.at_peak, live.total) == (20, {"a": 8, "b": 12}, 16)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 50)), max_size=40))
def test_the_peak_is_that_of_a_plain_count(steps):
    live, held, peak = LiveBytes(), {}, 0
    for adds, name, size in steps:
        if adds and name not in held:
            tensor = torch.zeros(size, dtype=torch.uint8)
            held[name] = tensor, live.add(tensor, str(name))
        elif name in held:
            held.pop(name)[1]()
        total = sum(tensor.numel() for tensor, _ in held.values())
        peak = max(peak, total)
        assert (live.total, live.peak, sum(live.at_peak.values())) == (total, peak, peak)


def test_expanded_tensors_have_the_bytes_of_their_storage():
    assert bytes_of(torch.zeros(1).expand(100)) == 4
    assert key_of(torch.zeros(4)[2:])[1] == 2
