import io

import pytest
from matplotlib.collections import PolyCollection

from lightning_hybrid.functional.memory_drawing import memory_figure, memory_png
from lightning_hybrid.functional.timeline import Change, Timeline
from tests.functional.test_timeline import STEP


def words(axes):
    return [text.get_text() for text in axes.texts]


def test_areas_are_groups_in_order_with_gradients_above_and_a_panel_for_what_is_elsewhere():
    above, below = memory_figure(STEP, beside={"parameters": 2048, "optimizer states": 0}).axes
    areas = [area for area in above.collections if isinstance(area, PolyCollection) and "_" not in area.get_label()]
    assert [area.get_label() for area in areas] == ["inlet", "blocks.0.linear", "(outside modules)", "gradients"]
    tops = [area.get_datalim(above.transData).y1 for area in areas]
    assert tops == [10, 40, 44, 51]
    assert words(above) == ["peak 51 B", "forward", "backward", "optimizer step"]
    assert above.get_title() == "memory in step 3, which has not ended, on top of parameters 2.0 KiB"
    lines = {line.get_label(): line.get_ydata().tolist() for line in below.lines}
    assert lines == {
        "in host memory": [0] * 6 + [2] * 3,
        "dropped, to be recomputed": [0] * 2 + [5] * 7,
        "compressed, bytes before": [0] * 7 + [6] * 2,
    }
    assert len({line.get_linestyle() for line in below.lines}) == 3  # for those who see no colours
    assert above.get_xlim() == (0, 8000)


def test_a_plain_step_has_one_panel_and_a_legend_of_phases_that_are_too_short_for_words():
    spans = [(i / 10, phase) for i, phase in enumerate(("forward", "backward") * 20)]
    step = Timeline(1, [Change(0.5, "activations", "", 3 * 1024**2)], spans, 4.0, has_ended=True)
    figure = memory_figure(step)
    (axes,) = figure.axes
    assert words(axes) == ["peak 3.0 MiB"]
    assert axes.get_ylabel() == "kept on the device [MiB]"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["forward", "backward"]


def test_picture_is_a_png_with_many_modules():
    changes = [Change(i / 100, "activations", f"blocks.{i % 40}.linear", 10 + i) for i in range(400)]
    file = io.BytesIO()
    memory_png(Timeline(2, changes, [(0.0, "forward")], 4.0), file, depth=2)
    assert file.getvalue().startswith(b"\x89PNG")


def test_nothing_is_not_drawn():
    for step in (Timeline(), Timeline(changes=STEP.changes)):
        with pytest.raises(ValueError, match="nothing to draw"):
            memory_figure(step)
