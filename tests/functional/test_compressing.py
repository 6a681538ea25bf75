from hypothesis import given
from hypothesis import strategies as st

from lightning_hybrid.functional.compressing import (
    COMPRESSION_COLUMNS,
    LayerBytes,
    compression_rows,
    group_layers,
    order_of_code,
    sum_layers,
)
from lightning_hybrid.functional.timeline import OUTSIDE

LAYERS = {
    "relu": LayerBytes(3200, {"bits": 100}),
    "pool": LayerBytes(1024, {"shape": 0, "argmax": 32, "raw": 224}),
    "head": LayerBytes(500, {}),
    "": LayerBytes(80, {"raw": 80}),
}


def test_rows_say_what_became_of_each_layer_and_of_all():
    rows = compression_rows(LAYERS)
    assert rows == [
        ("relu", "3,200", "100", "32.0x", "bits"),
        ("pool", "1,024", "256", "4.0x", "raw 224, argmax 32, shape 0"),
        ("head", "500", "0", "nothing left", ""),
        (OUTSIDE, "80", "80", "1.0x", "raw"),
        ("all", "4,804", "436", "11.0x", "raw 304, bits 100, argmax 32, shape 0"),
    ]
    assert {len(row) for row in rows} == {len(COMPRESSION_COLUMNS)}
    assert LayerBytes(25_600, {"sparse": 200}).ratio == "128x"
    assert compression_rows({}) == [("all", "0", "0", "nothing left", "")]


def test_codes_stand_by_their_last_word():
    codes = ["of another kind", "sparse fp8", "fp8", "sparse fp16", "raw", "fp16", "bits", "sparse"]
    assert sorted(codes, key=order_of_code) == [
        *("raw", "bits", "sparse", "fp16", "sparse fp16", "fp8", "sparse fp8", "of another kind"),
    ]


def test_few_layers_are_their_own_groups_and_those_that_save_nothing_are_none():
    assert group_layers(LAYERS | {"idle": LayerBytes(0, {})}) == {name or OUTSIDE: n for name, n in LAYERS.items()}
    assert group_layers({}) == {}


def test_of_many_layers_there_are_as_many_groups_as_names_allow():
    parts = [f"layers.{i}.{part}.{kind}" for i in range(24) for part in ("attn", "mlp") for kind in ("drop", "act")]
    layers = {"embed": LayerBytes(7, {"raw": 7}), **dict.fromkeys(parts, LayerBytes(10, {"bits": 1, "raw": 2}))}
    blocks = {f"layers.{i}": LayerBytes(40, {"bits": 4, "raw": 8}) for i in range(24)}
    assert group_layers(layers) == {"embed": layers["embed"], **blocks}
    assert list(group_layers(dict.fromkeys(map(str, range(80)), LayerBytes(10, {"bits": 1}))).items())[:2] == [
        ("0 ... 1", LayerBytes(20, {"bits": 2})),
        ("2 ... 3", LayerBytes(20, {"bits": 2})),
    ]


@given(st.lists(st.tuples(st.text("ab.", max_size=6), st.integers(0, 50), st.integers(0, 50)), max_size=60))
def test_groups_have_all_bytes_and_are_not_too_many(sizes):
    layers = {name: LayerBytes(before, {"bits": after} if before else {}) for name, before, after in sizes}
    groups = group_layers(layers, most=6)
    whole = sum_layers(layers.values())
    assert sum_layers(groups.values()) == whole
    assert whole.total_after == sum(layer.total_after for layer in groups.values())
    assert len(groups) <= 6 + 1  # what is outside of modules is always apart
