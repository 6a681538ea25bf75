"""Steps of `RMSpropToSGD` and its curve, element by element in float64, as they are written."""

import math

import numpy as np


def curve(i, c, q, literal):
    """The share of SGD at epoch i."""
    if i < c:
        return 0.5 * math.exp(2 * (i - c) / q)
    if i < c + q / 2:
        return 0.5 + (2 if literal else 1) * (i - c) / q
    return 1.0


def rmsprop_to_sgd(weights, gradients, rates, steps_per_epoch, *, center, period, decay, literal):
    """Weights after each step of a vector.

    Args:
        weights: At the start, [n].
        gradients: Of each step, [steps, n].
        rates: Of each step.
        steps_per_epoch: Steps.
        center: Epochs.
        period: Epochs.
        decay: Weight decay, in the gradient.
        literal: The line that circulates.
    """
    w = np.array(weights, dtype=np.float64)
    m, d = np.zeros_like(w), np.zeros_like(w)
    after = []
    for t in range(len(gradients)):
        a = curve(t / steps_per_epoch, center, period, literal)
        r = (1 - a) * 3e-4 / rates[t] if rates[t] else 0.0
        for k in range(len(w)):
            g = gradients[t][k] + decay * w[k]
            m[k] = 0.99 * m[k] + 0.01 * g**2
            d[k] = 0.9 * d[k] - (a + (r / (math.sqrt(m[k]) + 1e-8) if r else 0.0)) * g
            w[k] = w[k] + rates[t] * d[k]
        after.append(w.copy())
    return np.array(after)


def mean_of_two(start, first, second, weight):
    """Where a transition goes from a start, of where either of its optimizers would go."""
    return [w + (1 - weight) * (a - w) + weight * (b - w) for w, a, b in zip(start, first, second, strict=True)]
