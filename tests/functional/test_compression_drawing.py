import io
from itertools import pairwise

import pytest
from matplotlib.colors import to_hex

from lightning_hybrid.functional.compressing import LayerBytes
from lightning_hybrid.functional.compression_drawing import compression_figure, compression_png

KIB = 1024
LAYERS = {
    "relu": LayerBytes(32 * KIB, {"bits": KIB}),
    "conv": LayerBytes(16 * KIB, {"raw": 2 * KIB, "sparse fp8": KIB, "fp8": 5 * KIB}),
    "pool": LayerBytes(4 * KIB, {"shape": 0}),
}


def bars(axes):
    """By label, (start, width) of each row's bar."""
    return {bar.get_label(): [(patch.get_x(), patch.get_width()) for patch in bar] for bar in axes.containers}


def labels(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def test_bytes_after_are_stacked_below_those_before_and_ratios_stand_at_the_ends():
    figure = compression_figure(LAYERS, "saved activations of step 12")
    (axes,) = figure.axes
    assert axes.get_title() == "saved activations of step 12: 52.0 KiB to 9.0 KiB, 5.8x smaller"
    assert axes.get_xlabel() == "saved for backward [KiB]"
    assert labels(axes) == ["relu", "conv", "pool"]
    assert bars(axes) == {
        "before": [(0, 32), (0, 16), (0, 4)],
        "raw": [(0, 0), (0, 2), (0, 0)],
        "bits": [(0, 1), (2, 0), (0, 0)],
        "fp8": [(1, 0), (2, 5), (0, 0)],
        "sparse fp8": [(1, 0), (7, 1), (0, 0)],
    }
    assert [(text.get_text(), text.xy) for text in axes.texts] == [
        ("32.0x", (32, 0)),
        ("2.0x", (16, 1)),
        ("nothing left", (4, 2)),
    ]
    looks = [(to_hex(bar[0].get_facecolor()), bar[0].get_hatch()) for bar in axes.containers]
    assert len(set(looks)) == len(looks)
    assert looks[-1] == (looks[-2][0], "////")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(bars(axes))


def test_what_has_not_become_smaller_is_not_said_to():
    kept = {"a": LayerBytes(100, {"raw": 100})}
    assert compression_figure(kept).axes[0].get_title() == "saved activations: 100 B to 100 B"


def test_of_what_is_not_held_at_all_there_is_room_to_say_so():
    figure = compression_figure({"pool": LAYERS["pool"]})
    figure.draw_without_rendering()
    (text,) = figure.axes[0].texts
    assert figure.axes[0].get_title() == "saved activations: 4.0 KiB to 0 B"
    assert text.get_window_extent().x1 <= figure.bbox.x1


def test_long_names_of_many_layers_fit_and_do_not_overlap():
    layers = {
        f"a_network.with_a_long_name.and.blocks_in_it.numbered.{i}": LayerBytes(KIB, {"bits": 32}) for i in range(120)
    }
    figure = compression_figure(layers)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert labels(axes)[:2] == [
        "a_network.with_a_long...s_in_it.numbered.0 ... 2",
        "a_network.with_a_long...s_in_it.numbered.3 ... 5",
    ]
    boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert len(boxes) == 40
    assert all(above.y0 >= below.y1 for above, below in pairwise(boxes))
    assert min(box.x0 for box in boxes) >= 0


def test_picture_is_a_png():
    file = io.BytesIO()
    compression_png(LAYERS, file, title="some")
    assert file.getvalue().startswith(b"\x89PNG")


def test_nothing_is_not_drawn():
    with pytest.raises(ValueError, match="none of 1 layers"):
        compression_figure({"idle": LayerBytes(0, {})})
