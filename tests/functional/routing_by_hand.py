"""Routers as their papers print them, one token and one expert at a time; slow and plain, to compare with.

Each takes logits [T, E] and returns {(token, expert): weight} in order of priority, or a scalar.
"""

import math

import torch


def softmax(row):
    largest = max(value.item() for value in row)
    exponentials = [(value - largest).exp() for value in row]
    return [value / sum(exponentials) for value in exponentials]


def best(row, k, excluding=()):
    """The k largest, the lowest number first among equals."""
    numbers = [i for i in range(len(row)) if i not in excluding]
    return sorted(numbers, key=lambda i: (-row[i].item(), i))[:k]


def by_choice(choices):
    """Pairs of first choices, then of second ones: [(expert, weight), ...] of each token."""
    pairs = {}
    for place in range(max((len(choice) for choice in choices), default=0)):
        for token, choice in enumerate(choices):
            if place < len(choice):
                expert, weight = choice[place]
                pairs[token, expert] = weight
    return pairs


def top_k(logits, k, renormalize):
    choices = []
    for row in logits:
        p = softmax(row)
        chosen = best(row, k)
        total = sum(p[i] for i in chosen) if renormalize else 1
        choices.append([(i, p[i] / total) for i in chosen])
    return by_choice(choices)


def gshard(logits, chances):
    choices = []
    for row, chance in zip(logits, chances, strict=True):
        g = softmax(row)
        e1, e2 = best(row, 2)
        g1, g2 = g[e1] / (g[e1] + g[e2]), g[e2] / (g[e1] + g[e2])
        choices.append([(e1, g1), (e2, g2)] if 2 * g2.item() > chance.item() else [(e1, g1)])
    return by_choice(choices)


def noisy_logits(clean, deviation, draws):
    return (
        torch.stack(
            [
                torch.stack([h + e * s for h, s, e in zip(*rows, strict=True)])
                for rows in zip(clean, deviation, draws, strict=True)
            ]
        )
        if len(clean)
        else clean
    )


def noisy_top_k(noisy, k):
    choices = []
    for row in noisy:
        kept = best(row, k)
        gates = softmax([row[i] for i in kept])
        choices.append(list(zip(kept, gates, strict=True)))
    return by_choice(choices)


def normal_distribution(x):
    return (1 + torch.erf(x / math.sqrt(2))) / 2


def probability_of_choice(clean, noisy, deviation, k, token, expert):
    if k == clean.shape[1]:
        return torch.ones((), dtype=clean.dtype)
    others = best(noisy[token], k, excluding=[expert])
    kth_excluding = noisy[token][others[-1]]
    return normal_distribution((clean[token][expert] - kth_excluding) / deviation[token][expert])


def squared_variation(values):
    mean = sum(values) / len(values)
    if mean.item() == 0:
        return torch.zeros(())
    return sum((value - mean) ** 2 for value in values) / len(values) / mean**2


def expert_choice(logits, capacity, num_groups):
    size = len(logits) // num_groups
    probabilities = [softmax(row) for row in logits]
    pairs = {}
    for place in range(min(capacity, size)):
        for group in range(num_groups):
            tokens = range(group * size, (group + 1) * size)
            for expert in range(logits.shape[1]):
                token = tokens[best([probabilities[t][expert] for t in tokens], place + 1)[-1]]
                pairs[token, expert] = probabilities[token][expert]
    return pairs


def loss_free(scores, bias, k, renormalize):
    choices = []
    for row in scores:
        chosen = best([s + b for s, b in zip(row, bias, strict=True)], k)
        total = sum(row[i] for i in chosen) if renormalize else 1
        choices.append([(i, row[i] / total) for i in chosen])
    return by_choice(choices)


def keep_first(pairs, num_tokens, capacity, num_groups):
    taken, kept = {}, []
    for token, expert in pairs:
        queue = token // (num_tokens // num_groups), expert
        kept.append(taken.get(queue, 0) < capacity)
        taken[queue] = taken.get(queue, 0) + 1
    return kept
