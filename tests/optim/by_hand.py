"""Adafactor and SM3 in numpy float64, equation by equation: plain loops, nothing of the package."""

import itertools
import math

import numpy as np


def places(lengths):
    return itertools.product(*map(range, lengths))


def longest_two(shape):
    """The later ones of equal ones, in order."""
    found = []
    for _ in range(2):
        rest = [dim for dim in range(len(shape)) if dim not in found]
        longest = max(shape[dim] for dim in rest)
        found.append(max(dim for dim in rest if shape[dim] == longest))
    return tuple(sorted(found))


def root_mean_square(values):
    return math.sqrt(sum(float(value) ** 2 for value in values.flat) / max(1, values.size))


def adafactor(weight, gradients, *, lr, tau, eps1, eps2, d, decay, scale, relative, least):
    """The weight after all gradients (None stands for none), and the moments R and C, or V."""
    weight, t, state = weight.copy(), 0, {}
    for gradient in gradients:
        if gradient is None:
            continue
        t += 1
        beta = 1 - t**tau
        is_factored = weight.ndim >= 2 and sorted(weight.shape)[-2] >= least
        direction = (factored_direction if is_factored else whole_direction)(gradient, state, beta, eps1)
        rho = min(lr, 1 / math.sqrt(t)) if relative else lr
        alpha = rho * max(eps2, root_mean_square(weight)) if scale else rho
        clipped = max(1.0, root_mean_square(direction) / d)
        for i in places(weight.shape):
            weight[i] = (1 - lr * decay) * weight[i] - alpha * direction[i] / clipped
    return weight, state


def whole_direction(gradient, state, beta, eps1):
    moments = state.setdefault("exp_avg_sq", np.zeros(gradient.shape))
    direction = np.zeros(gradient.shape)
    for i in places(gradient.shape):
        moments[i] = beta * moments[i] + (1 - beta) * (gradient[i] ** 2 + eps1)
        direction[i] = gradient[i] / math.sqrt(moments[i])
    return direction


def factored_direction(gradient, state, beta, eps1):
    a, b = longest_two(gradient.shape)
    num_rows, num_columns = gradient.shape[a], gradient.shape[b]
    rows = state.setdefault("exp_avg_sq_row", np.zeros([1 if k == b else n for k, n in enumerate(gradient.shape)]))
    columns = state.setdefault("exp_avg_sq_col", np.zeros([1 if k == a else n for k, n in enumerate(gradient.shape)]))
    direction = np.zeros(gradient.shape)

    def at(place, i, j):
        return tuple(i if k == a else j if k == b else n for k, n in enumerate(place))

    for place in places([1 if k in (a, b) else n for k, n in enumerate(gradient.shape)]):  # a matrix each
        for i in range(num_rows):
            mean = sum(gradient[at(place, i, j)] ** 2 + eps1 for j in range(num_columns)) / num_columns
            rows[at(place, i, 0)] = beta * rows[at(place, i, 0)] + (1 - beta) * mean
        for j in range(num_columns):
            mean = sum(gradient[at(place, i, j)] ** 2 + eps1 for i in range(num_rows)) / num_rows
            columns[at(place, 0, j)] = beta * columns[at(place, 0, j)] + (1 - beta) * mean
        mean = sum(rows[at(place, i, 0)] for i in range(num_rows)) / num_rows
        for i, j in places([num_rows, num_columns]):
            moment = rows[at(place, i, 0)] * columns[at(place, 0, j)] / mean
            direction[at(place, i, j)] = gradient[at(place, i, j)] / math.sqrt(moment)
    return direction


def sm3(weight, gradients, *, lr, beta, decay):
    """The weight after all gradients (None stands for none), and the accumulators and m."""
    weight = weight.copy()
    mu = [np.zeros(length) for length in weight.shape] or [np.zeros(1)]
    m = np.zeros(weight.shape)
    for gradient in gradients:
        if gradient is None:
            continue
        largest = [np.zeros_like(accumulator) for accumulator in mu]
        for i in places(weight.shape):
            slices = i or (0,)
            nu = min(mu[k][j] for k, j in enumerate(slices)) + gradient[i] ** 2
            for k, j in enumerate(slices):
                largest[k][j] = max(largest[k][j], nu)
            m[i] = beta * m[i] + (1 - beta) * (gradient[i] / math.sqrt(nu) if nu > 0 else 0.0)
            weight[i] = (1 - lr * decay) * weight[i] - lr * m[i]
        mu = largest
    state = {f"accumulator_{k}": accumulator for k, accumulator in enumerate(mu)}
    return weight, state | ({"momentum_buffer": m} if beta else {})
