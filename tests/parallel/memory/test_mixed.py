"""What passes have shown, as units of a plan; tests/callbacks/test_memory_policy.py shows that ledgers agree."""

import torch

from lightning_hybrid.functional.mixing_plan import Mix, Saved, Unit, Ways
from lightning_hybrid.functional.segments import Segment
from lightning_hybrid.parallel.memory.keys import BEFORE, Key, Met
from lightning_hybrid.parallel.memory.mixed import seconds_to_copy
from lightning_hybrid.parallel.memory.mixed_items import Item, Measured, measured_pass, units_of

FIRST = "(before a)"
GROUPS = {"-": BEFORE, "a+": "(after a)", "b+": "(after b)", "c+": "(after c)"}


class Use:
    """A storage that blocks a, b and c save (small letters) or get (capitals), in this order, or the code between."""

    def __init__(self, num_bytes, groups, handed_on="", **options):
        self.savers, self.options, keys = set(), options, {}
        for name in groups.split():
            group = GROUPS.get(name, name.lower())
            keys.setdefault(group, Key(group, num_bytes, is_argument=name.isupper()))
            self.savers |= set() if name.isupper() else {group}
        self.met, self.reached = Met(num_bytes, list(keys.values()), {*handed_on.split()}), set()

    def item(self, part, reached):
        self.reached = reached
        return Item(self.met.num_bytes, frozenset(self.met.keys), is_saved=bool(self.savers), **self.options)


PLACES = [
    (Use(1, "-"), FIRST, "after"),
    (Use(2, "A a"), "a", "arguments"),  # of the first block, whoever made it
    (Use(3, "- A a"), "a", "arguments"),
    (Use(4, "a"), "a", "internal"),
    (Use(5, "a B b", "b"), "b", "arguments"),
    (Use(6, "B b"), "b", "arguments"),
    (Use(7, "a B C c", "b"), "a", "after"),
    (Use(8, "a+ B b"), "b", "arguments"),
    (Use(12, "a B b b+", "b"), "a", "after"),
    (Use(9, "a c"), "a", "after"),
    (Use(10, "c c+"), "c", "after"),
    (Use(11, "B", "b"), "b", "arguments"),
]


def test_storages_belong_where_a_plan_can_decide_about_them():
    found = measured_pass([use for use, _, _ in PLACES], ["a", "b", "c"])
    assert found.order == [FIRST, "a", "b", "c"]
    places = {item.num_bytes: (unit, part) for (unit, part, _), item in found.items.items()}
    expected = {use.met.num_bytes: (unit, part) for use, unit, part in PLACES}
    assert places == expected
    assert found.beside == {FIRST: 3, "a": 5 + 8}
    assert found.starts == {"a", "b"}
    use = next(use for use, _, _ in PLACES if use.met.num_bytes == 4)
    assert use.reached == {BEFORE, "a", "(after a)", "b"}


def test_passes_and_ranks_are_merged_by_the_most_that_each_has_shown():
    total = Measured()
    total.add(measured_pass([Use(4, "a", compressed_bytes=2, can_move=True)], ["a", "c"]))
    total.add(measured_pass([Use(4, "a", compressed_bytes=3, can_move=True), Use(9, "b")], ["a", "b", "c"]))
    total.add(measured_pass([], ["d"]))
    assert total.order == [FIRST, "a", "b", "c", "(before d)", "d"]
    assert total.blocks == {"a", "b", "c", "d"}
    key = Key("a", 4, is_argument=False)
    assert total.items["a", "internal", key] == Item(4, frozenset({key}), frozenset("a"), True, 3, 0.0, True)
    again = Measured(["a"], {("a", "internal", key): Item(6, frozenset({key}))}, {"a": 1}, {"a"}, {"a": 2.0}, 3, 0.5)
    total.add(again)
    assert total.items["a", "internal", key] == Item(6, frozenset({key}), frozenset("a"))
    assert (total.beside, total.starts, total.seconds) == ({"a": 1}, {"a"}, {"a": 2.0})
    assert (total.in_flight, total.copy_seconds) == (3, 0.5)


def test_units_join_what_can_only_be_kept_and_ways_are_found_by_key():
    uses = [Use(4, "A a", compressed_bytes=4), Use(6, "a", can_move=True), Use(2, "a"), Use(3, "a"), Use(5, "a+")]
    measured = measured_pass(uses, ["a"])
    measured.seconds, measured.copy_seconds = {"a": 1.0}, 0.5
    found = units_of(measured)
    internal = (Saved(6, offload_seconds=3.0), Saved(5))
    assert found.units == [Unit(), Unit((Saved(4),), (True,), internal, (Saved(5),), 1.0)]
    mix = Mix((Segment(0, 1, False), Segment(1, 2, False)), (Ways(), Ways(("kept",), ("offloaded", "kept"), ("kept",))))
    assert {key.number: way for key, way in found.ways(mix).items()} == {
        **dict.fromkeys((2, 3, 4, 5), "kept"),
        6: "offloaded",
    }
    dropped = Mix((Segment(0, 2, True),), (Ways(), Ways(("kept",), ("dropped", "dropped"), ("kept",))))
    assert {key.number for key in found.ways(dropped)} == {4, 5}


def test_what_has_two_places_goes_the_way_that_takes_less():
    key = Key("a", 0, is_argument=False)
    items = {("a", "internal", key): Item(4, frozenset({key})), ("a", "after", key): Item(4, frozenset({key}))}
    found = units_of(Measured(["a"], items))
    for ways, expected in ((("kept", "offloaded"), "offloaded"), (("compressed", "kept"), "compressed")):
        mix = Mix((Segment(0, 1, False),), (Ways((), ways[:1], ways[1:]),))
        assert found.ways(mix) == {key: expected}


def test_copies_take_time():
    assert seconds_to_copy(torch.device("cpu")) > 0
