import math
import time

import pytest
import torch

from lightning_hybrid import add_auxiliary_loss
from lightning_hybrid.functional.lowering import lower
from lightning_hybrid.functional.schedules import Kind, choose, forward_only
from lightning_hybrid.parallel.mesh import Layout, Mesh
from lightning_hybrid.parallel.pipeline.executor import Executor, Work
from lightning_hybrid.parallel.pipeline.plan import Plan, TensorSpec
from lightning_hybrid.parallel.pipeline.run import Result
from tests.launch import run_ranks

CPU = torch.device("cpu")
INPUTS = [2.0, 3.0, 5.0, 7.0]
FACTORS = [1.5, -2.0, 0.5, 3.0]  # stage s multiplies by FACTORS[s]


class Multiplying:
    """Stages that multiply one number; beside it travel whole numbers, and a value that nobody uses."""

    def __init__(self, num_stages, *, auxiliary=False, constant=False):
        self.mesh = Mesh(Layout(2, 1), device=CPU)
        self.executor = Executor(self.mesh, num_stages)
        self.num_stages, self.auxiliary, self.constant = num_stages, auxiliary, constant
        self.stages = range(self.mesh.rank, num_stages, 2)
        self.factors = {s: torch.tensor(FACTORS[s], dtype=torch.float64, requires_grad=True) for s in self.stages}
        self.losses, self.backwards = {}, []

    def plans(self, number):
        specs = (
            TensorSpec((), (), torch.float64, torch.is_grad_enabled()),
            TensorSpec((2,), (1,), torch.int64, False),
            TensorSpec((3,), (1,), torch.float64, torch.is_grad_enabled()),
        )
        last = self.num_stages - 1
        return [
            {
                s: Plan("key", received=specs if s else (), sent=specs if s < last else (), auxiliary=self.auxiliary)
                for s in self.stages
            }
            for _ in range(number)
        ]

    def forward(self, stage, i, payload):
        if stage == 0:
            x, numbers, unused = (
                torch.tensor(INPUTS[i], dtype=torch.float64),
                torch.tensor([i, 0]),
                torch.ones(3).double(),
            )
        else:
            x, numbers, unused = payload
            assert numbers.tolist() == [i, stage]
            assert x.requires_grad == torch.is_grad_enabled()
        out = x * self.factors[stage]
        if self.auxiliary and stage < 2:
            out = add_auxiliary_loss(out, 10 * self.factors[stage])
        if stage < self.num_stages - 1:
            return Result([out, numbers + torch.tensor([0, 1]), unused * self.factors[stage] * 0 + 1])
        self.losses[i] = out.item()
        return Result([], out.detach() if self.constant else out)

    def run(self, schedule, weights, *, travels=False):
        program = lower(schedule, self.num_stages)[self.mesh.rank]
        work = Work(
            program,
            self.plans(len(weights)),
            self.forward,
            lambda i, loss: (loss, weights[i]),
            lambda i: None if travels else weights[i],
            lambda stage, i: self.backwards.append((stage, i)),
            lambda stage, i: None,
        )
        self.executor.run(work)
        return program


WEIGHTS = [0.25, 0.5, 0.125, 0.0]


def trained(name, chunks, auxiliary, travels):
    stages = Multiplying(2 * chunks, auxiliary=auxiliary)
    program = stages.run(choose(name, 2, 4, chunks), WEIGHTS, travels=travels)
    assert stages.backwards == [(a.stage, a.micro_batch) for a in program if a.kind is Kind.BACKWARD]
    again = Multiplying(2 * chunks, auxiliary=auxiliary)
    for _ in range(2):  # nothing is left over from a step; gradients add up
        again.run(choose(name, 2, 4, chunks), WEIGHTS, travels=travels)
    assert all(again.factors[s].grad == 2 * stages.factors[s].grad for s in stages.stages)
    return {s: f.grad.item() for s, f in stages.factors.items()}, stages.losses, stages.executor.peak_in_flight


@pytest.mark.parametrize(
    ("name", "chunks", "auxiliary", "travels"),
    [
        ("gpipe", 1, False, False),
        ("1f1b", 1, True, True),
        ("interleaved_1f1b", 2, True, False),
        ("interleaved_1f1b", 2, True, True),
        ("gpipe", 2, False, True),
    ],
)
def test_gradients_are_those_of_the_weighted_sum_of_losses(name, chunks, auxiliary, travels):
    (first, _, peak), (second, losses, last_peak) = run_ranks(2, trained, name, chunks, auxiliary, travels)
    factors = FACTORS[: 2 * chunks]
    product = math.prod(factors)
    assert losses == pytest.approx({i: x * product for i, x in enumerate(INPUTS)})
    weighted = sum(weight * x for weight, x in zip(WEIGHTS, INPUTS, strict=True))
    for stage, gradient in (first | second).items():
        expected = weighted * product / factors[stage] + (10 * sum(WEIGHTS) if auxiliary and stage < 2 else 0)
        assert gradient == pytest.approx(expected), stage
    if chunks == 1:
        assert (peak, last_peak) == ((4, 4) if name == "gpipe" else (2, 1))


def evaluated_and_constant():
    stages = Multiplying(4)
    with torch.no_grad():
        stages.run(forward_only(2, 4, 2), [1.0] * 4)
    in_flight = stages.executor.peak_in_flight
    constant = Multiplying(2, constant=True)
    constant.run(choose("1f1b", 2, 2, 1), [1.0] * 2)
    return stages.losses, stages.backwards, in_flight, [f.grad for f in constant.factors.values()]


def test_an_evaluation_has_no_backward_and_a_constant_loss_no_gradient():
    (_, backwards, in_flight, gradients), (losses, _, _, last) = run_ranks(2, evaluated_and_constant)
    assert losses == pytest.approx({i: x * math.prod(FACTORS) for i, x in enumerate(INPUTS)})
    assert backwards == []
    assert in_flight == 1  # what has been sent is not kept
    assert [gradient.item() for gradient in gradients] == [0]
    assert last == [None]


def recorded():
    stages = Multiplying(2)
    stages.executor.record = True
    before = time.perf_counter()
    program = stages.run(choose("1f1b", 2, 3, 1), WEIGHTS[:3])
    events = stages.executor.events
    assert [action for _, action, _, _ in events] == program
    assert {rank for rank, *_ in events} == {stages.mesh.rank}
    times = [time for _, _, start, end in events for time in (start, end)]
    assert times == sorted(times)
    assert before <= times[0]
    assert times[-1] <= time.perf_counter()
    stages.executor.record = False
    stages.run(choose("1f1b", 2, 3, 1), WEIGHTS[:3])
    return stages.executor.events


def test_times_are_recorded_in_order_on_request_only():
    assert run_ranks(2, recorded) == [[], []]


def failing():
    stages = Multiplying(2)
    if stages.mesh.rank == 0:
        stages.forward = lambda *_: 1 / 0
        stages.run(choose("1f1b", 2, 1, 1), [1.0])
    return stages.mesh.rank


def test_an_error_in_a_stage_is_the_users_own():
    with pytest.raises(RuntimeError, match=r"(?s)rank 0 of 2 failed.*ZeroDivisionError"):
        run_ranks(2, failing)
