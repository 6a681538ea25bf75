import numpy
import pytest

from lightning_hybrid.functional.divergence import SpikeWindow, not_finite, robust_score


def judged(losses, window=50, threshold=10.0):
    """Numbers of the values that a window calls spikes, which are not taken in."""
    spikes, found = SpikeWindow(window, threshold), []
    for number, loss in enumerate(losses):
        if spikes.judge(loss, 1.0):
            found.append(number)
        else:
            spikes.add(loss, 1.0)
    return found


def test_the_score_is_that_of_the_median_absolute_deviation():
    values = numpy.random.default_rng(0).normal(3, 2, 31)
    middle = numpy.median(values)
    expected = (9.0 - middle) / (1.4826 * numpy.median(abs(values - middle)))
    assert robust_score(values.tolist(), 9.0) == pytest.approx(expected, rel=1e-12)
    assert robust_score([2.0] * 9, 2.2) == pytest.approx(10.0)  # a hundredth of the median is the least deviation


def test_where_most_values_are_equal_the_farthest_tells_the_scale():
    """As with a hinge loss, most of whose batches have nothing left to learn."""
    assert robust_score([0.0] * 30 + [0.5, 0.25], 0.5) == pytest.approx(1 / 1.4826, rel=1e-12)
    assert robust_score([1.0] * 30 + [1.5, 0.9], 9.0) == pytest.approx(8 / (1.4826 * 0.5), rel=1e-12)
    assert robust_score([0.0] * 9, 1e-9) == 0  # there is no scale at all
    hinge = numpy.where(numpy.random.default_rng(2).random(2000) < 0.05, 0.3, 0.0)
    hinge[1500] = 90.0
    assert judged(hinge) == [1500]


def test_noise_is_no_spike_and_a_spike_is_one():
    noise = numpy.random.default_rng(1).normal(2, 0.3, 2000)
    falling = 0.2 + 5 * numpy.exp(-numpy.arange(2000) / 300) + 0.02 * noise
    assert judged(noise) == judged(falling) == judged([1.5] * 200) == []
    noise[1000] = 9.0
    falling[[30, 700]] += 8
    assert judged(noise) == [1000]
    assert judged(falling) == [30, 700]
    assert judged([1.0] * 24 + [50.0]) == []  # too few steps to judge by
    assert judged([1.0] * 25 + [50.0]) == [25]


def test_the_norm_is_judged_too_and_states_go_on():
    spikes = SpikeWindow(4)
    for _ in range(4):
        spikes.add(1.0, 2.0)
    again = SpikeWindow(4)
    again.load_state_dict(spikes.state_dict())
    reason = again.judge(1.0, 9.0)
    assert reason == "gradient norm 9 is 350 robust standard deviations above 2, the median of 4 steps"
    again.clear()
    assert not again.judge(1.0, 9.0)


@pytest.mark.parametrize(
    ("loss", "norm", "words"),
    [
        (1.0, 2.0, ""),
        (float("nan"), 2.0, "loss is nan"),
        (1.0, float("inf"), "gradient norm is inf"),
        (float("inf"), float("nan"), "loss is inf and gradient norm is nan"),
    ],
)
def test_numbers_that_are_not_finite(loss, norm, words):
    assert not_finite(loss, norm) == words
    assert SpikeWindow().judge(loss, norm) == words


@pytest.mark.parametrize(
    ("options", "words"),
    [({"window": 1}, "window=1 "), ({"window": 2.0}, "window=2.0 "), ({"threshold": 0}, "threshold=0 ")],
)
def test_wrong_numbers_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        SpikeWindow(**options)
