"""Parameters of many shapes with gradients that are sometimes missing; steps on them."""

import copy
import pickle

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

SHAPES = [
    (),
    (1,),
    (7,),
    (0,),
    (0, 5),
    (1, 6),
    (6, 1),
    (1, 1),
    (5, 7),
    (7, 5),
    (5, 5),
    (3, 5, 7),
    (6, 3, 4),
    (5, 4, 3, 3),
]
NUM_STEPS = 20


def draw(shapes, num_steps, dtype=torch.float64):
    """Parameters, and for each step their gradients; the third has none in every fourth step."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]
    gradients = [
        [
            None
            if i == 2 and step % 4 == 1
            else torch.randn(shape, generator=generator, dtype=dtype) * 10.0 ** (i % 5 - 2)
            for i, shape in enumerate(shapes)
        ]
        for step in range(num_steps)
    ]
    return parameters, gradients


def take_steps(optimizer, parameters, gradients):
    """Steps with gradients that are dealt out as the parameters are."""
    for of_step in gradients:
        for parameter, gradient in zip(parameters, of_step, strict=True):
            if isinstance(parameter, DTensor) and gradient is not None:
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()


def assert_copies_go_on(make):
    """A deep copy of parameters and optimizer, and a pickled one, make the same next steps as they."""
    parameters, gradients = draw(SHAPES, 6)
    optimizer = make(parameters)
    take_steps(optimizer, parameters, gradients[:3])
    twins = [copy.deepcopy((parameters, optimizer)), pickle.loads(pickle.dumps((parameters, optimizer)))]
    take_steps(optimizer, parameters, gradients[3:])
    for others, twin in twins:
        take_steps(twin, others, gradients[3:])
        assert all(torch.equal(p, other) for p, other in zip(parameters, others, strict=True))


def assert_nothing_moves_without_rate_and_gradients(make):
    """Signs of zeros too, and the steps that follow are finite."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        parameters, _ = draw([*SHAPES, (33, 40)], 0, dtype)
        with torch.no_grad():
            parameters[-1][0], parameters[-1][1] = 0.0, -0.0
        before = [p.detach().clone() for p in parameters]
        optimizer = make(parameters, lr=torch.tensor(0.0))
        take_steps(optimizer, parameters, [[torch.zeros_like(p) for p in parameters]])
        for parameter, values in zip(parameters, before, strict=True):
            assert torch.equal(parameter.signbit(), values.signbit())
            assert torch.equal(parameter, values)
        optimizer.param_groups[0]["lr"] = 0.1
        take_steps(
            optimizer, parameters, [[torch.full_like(p, value) for p in parameters] for value in (0.0, 1e-30, 1e-19)]
        )
        tensors = [*parameters, *(state for states in optimizer.state.values() for state in states.values())]
        assert all(tensor.isfinite().all() for tensor in tensors)
