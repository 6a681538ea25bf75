"""LARS and LAMB in numpy float64, equation by equation: plain loops, nothing of the package."""

import math

import numpy as np


def norm(values):
    return math.sqrt(sum(float(value) ** 2 for value in values.flat))


def is_adapted(adapt, values):
    return values.ndim >= 2 if adapt is None else adapt


def lars(weight, gradients, *, rates, mu, beta, eta, most, adapt, nesterov):
    """The weight after all gradients (None stands for none), each with a rate of its own, and the buffer."""
    weight, v = weight.copy(), np.zeros(weight.shape)
    for gradient, rate in zip(gradients, rates, strict=True):
        if gradient is None:
            continue
        ratio = 1.0
        if is_adapted(adapt, weight) and norm(weight) > 0 and norm(gradient) > 0:
            ratio = eta * norm(weight) / (norm(gradient) + beta * norm(weight))
            ratio = min(ratio, most)
        for i in np.ndindex(weight.shape):
            change = rate * ratio * (gradient[i] + beta * weight[i])
            v[i] = mu * v[i] + change
            weight[i] = weight[i] - (mu * v[i] + change if nesterov else v[i])
    return weight, v


def lamb(weight, gradients, *, rates, beta1, beta2, eps, decay, correct, bounds, most, adapt):
    """The weight after all gradients (None stands for none), each with a rate of its own, and both moments."""
    weight, m, v, t = weight.copy(), np.zeros(weight.shape), np.zeros(weight.shape), 0
    for gradient, rate in zip(gradients, rates, strict=True):
        if gradient is None:
            continue
        t += 1
        u = np.zeros(weight.shape)
        for i in np.ndindex(weight.shape):
            m[i] = beta1 * m[i] + (1 - beta1) * gradient[i]
            v[i] = beta2 * v[i] + (1 - beta2) * gradient[i] ** 2
            first = m[i] / (1 - beta1**t) if correct else m[i]
            second = v[i] / (1 - beta2**t) if correct else v[i]
            u[i] = first / (math.sqrt(second) + eps) + decay * weight[i]
        ratio = 1.0
        if is_adapted(adapt, weight) and norm(weight) > 0 and norm(u) > 0:
            ratio = min(max(norm(weight), bounds[0]), bounds[1]) / norm(u)
            ratio = min(ratio, most)
        for i in np.ndindex(weight.shape):
            weight[i] = weight[i] - rate * ratio * u[i]
    return weight, m, v
