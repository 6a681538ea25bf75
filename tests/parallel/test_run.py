import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.parallel.pipeline.cut import StageCut
from lightning_hybrid.parallel.pipeline.plan import Plan
from lightning_hybrid.parallel.pipeline.probe_run import ProbeRun
from lightning_hybrid.parallel.pipeline.provenance import AbsentValueError
from lightning_hybrid.parallel.pipeline.run import StageRun, fill_in_place

CPU = torch.device("cpu")


def received(*shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape).requires_grad_()


def test_every_variable_and_view_sees_the_received_value_and_its_gradient():
    dummy = torch.empty(2, 3)
    kept, row, flat, early = dummy, dummy[1], dummy.view(-1), dummy.detach()
    payload = received(2, 3)
    fill_in_place(dummy, payload)
    assert kept is dummy
    assert row.tolist() == [4, 5, 6]
    assert early.tolist() == payload.tolist()
    assert not early.requires_grad
    (row.sum() + 10 * flat[0]).backward()
    assert payload.grad.tolist() == [[10, 0, 0], [1, 1, 1]]


def test_filling_a_view_fills_its_base():
    base = torch.empty(6)
    payload = received(2, 3)
    fill_in_place(base.view(2, 3), payload)
    base.sum().backward()
    assert base.tolist() == [1, 2, 3, 4, 5, 6]
    assert payload.grad.tolist() == [[1, 1, 1], [1, 1, 1]]


def test_what_an_empty_tensor_was_computed_from_gets_no_gradient():
    weight = torch.ones(3, requires_grad=True)
    dummy = weight * 2
    payload = received(3)
    fill_in_place(dummy, payload)
    dummy.sum().backward()
    assert weight.grad is None
    assert payload.grad.tolist() == [1, 1, 1]


def test_a_value_without_gradient_is_filled_without_one():
    weight = torch.ones(3, requires_grad=True)
    dummy = weight * 2
    fill_in_place(dummy, torch.tensor([1.0, 2.0, 3.0]))
    assert dummy.tolist() == [1, 2, 3]
    assert not dummy.requires_grad


def test_transposed_memory_is_filled():
    dummy = torch.empty_strided((2, 3), (1, 2))
    fill_in_place(dummy, received(2, 3))
    assert dummy.tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    "dummy",
    [lambda: torch.empty(1).expand(3), lambda: torch.ones(6, requires_grad=True).mul(1).chunk(2)[0]],
    ids=["expanded", "one of several views"],
)
def test_what_autograd_cannot_write_into_is_an_error(dummy):
    with pytest.raises(RuntimeError):
        fill_in_place(dummy(), received(3))


class Chain(nn.Module):
    """Residual connections outside of the blocks, a mask beside the activations, a head."""

    def __init__(self, depth=4):
        super().__init__()
        torch.manual_seed(5)
        self.inlet, self.head = nn.Linear(3, 3), nn.Linear(3, 1)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(depth))
        self.double()

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x).square().mean()


class InPlace(Chain):
    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            y = block(x)
            y += x
            x = y[:, [2, 0, 1]].clamp_(min=-1)
        return self.head(x).sum()


class Pairs(Chain):
    """Blocks whose output is cut up before the next one, and given by keyword and in a tuple."""

    class Block(nn.Linear):
        def forward(self, pair, *, scale):
            return super().forward(torch.cat(pair, 1)) * scale

    def __init__(self, depth=4):
        super().__init__(0)
        self.blocks = nn.ModuleList(self.Block(3, 3) for _ in range(depth)).double()

    def forward(self, x):
        x, scale = self.inlet(x), x.mean()
        for block in self.blocks:
            x = block(x.split([1, 2], 1), scale=scale)
        return self.head(x).mean()


class Peeking(Chain):
    """A view that is taken before each block, and so before the cut, is used at the end."""

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = torch.tanh(x)
            before = x[:, :1]
            x = block(x)
        return (self.head(x) * before).square().mean()


class Checkpointed(Chain):
    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False).tanh() + x
        return self.head(x).square().mean()


MODELS = [Chain, InPlace, Pairs, Peeking, Checkpointed]


def stages(model, sizes, x, *, training=True):
    """Probe each stage and run it, each on a copy of the model, and hand payloads on as the ranks would."""
    cuts = [
        StageCut(
            copy.deepcopy(model),
            [f"blocks.{i}" for i in range(sum(sizes))],
            sizes,
            pipeline=len(sizes),
            rank=rank,
            device=CPU,
        )
        for rank in range(len(sizes))
    ]
    outputs, exit, specs, number, payload = {}, (), (), 0, []
    plans = []
    with nullcontext() if training else torch.no_grad():
        for stage, cut in enumerate(cuts):
            plan = Plan("key", outputs=outputs, entry=exit, received=specs)
            run = ProbeRun(cut, stage, plan, payload, num_arguments=number, training=training)
            result = run.run(lambda cut=cut: cut.root(x))
            payload = [t.detach().requires_grad_(t.requires_grad) for t in result.payload]
            exit, specs, number = plan.exit, plan.sent, run.num_arguments
            plans.append(plan)
        return cuts, plans, run_stages(cuts, plans, x)


def run_stages(cuts, plans, x):
    ends, payload = [], []
    for stage, (cut, plan) in enumerate(zip(cuts, plans, strict=True)):
        result = StageRun(cut, stage, plan, payload).run(lambda cut=cut: cut.root(x))
        ends.append((payload, result))
        payload = [t.detach().requires_grad_(t.requires_grad) for t in result.payload]
    return ends


def backward(ends):
    ends[-1][1].output.backward()
    for (payload, _), (_, earlier) in zip(reversed(ends[1:]), reversed(ends[:-1]), strict=True):
        torch.autograd.backward(
            [t for t in earlier.payload if t.requires_grad], [t.grad for t in payload if t.requires_grad]
        )


@pytest.mark.parametrize("sizes", [(2, 2), (1, 3), (3, 1), (1, 1, 1), (2, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_stages_one_after_the_other_give_the_loss_and_gradients_of_the_whole(model, sizes):
    model = model(sum(sizes))
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    cuts, _, ends = stages(model, sizes, x)
    loss = model(x)
    torch.testing.assert_close(ends[-1][1].output, loss)
    loss.backward()
    backward(ends)
    for name, parameter in model.named_parameters():
        parts = [cut.parameters[name].grad for cut in cuts if name in cut.parameters]
        present = [part for part in parts if part is not None]
        torch.testing.assert_close(sum(present), parameter.grad, msg=name)
        if not name.startswith("blocks"):
            assert len(present) == 1, f"{name} was run by {len(present)} stages"


def test_an_evaluation_gives_the_same_loss_without_gradients():
    x = torch.ones(2, 3).double()
    _, _, ends = stages(Chain(), (2, 2), x, training=False)
    torch.testing.assert_close(ends[-1][1].output, Chain()(x).detach())
    assert not ends[0][1].payload[0].requires_grad


def test_only_what_was_computed_crosses_and_modules_that_nobody_needs_are_not_run():
    _, plans, ends = stages(Pairs(), (2, 2), torch.ones(2, 3).double())
    assert [tuple(spec.shape) for spec in plans[0].sent] == [
        (2, 1),
        (2, 2),
    ]  # not the scale, which comes from the batch
    assert plans[0].sent == plans[1].received
    assert plans[1].gated == {("inlet", 0)}
    assert plans[1].replaced == {0, 1}  # views of one tensor cannot be filled
    assert [len(result.payload) for _, result in ends] == [2, 0]


def test_an_unseen_path_meets_nan_and_never_a_finite_number():
    class Skipping(Chain):
        later = False

        def forward(self, x):
            kept = x = self.blocks[0](x)
            for block in self.blocks[1:]:
                x = block(x)
            return self.head(x + kept if self.later else x).mean()

    cuts, plans, ends = stages(Skipping(), (2, 2), torch.ones(2, 3).double())
    assert ends[-1][1].output.isfinite()
    for cut in cuts:
        cut.root.later = True
    assert run_stages(cuts, plans, torch.ones(2, 3).double())[-1][1].output.isnan()


class Ordered(Chain):
    order = ()

    def forward(self, x):
        outputs = [x := self.blocks[i](x) for i in self.order]
        return self.head(outputs[-1]).mean()


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ((3, 2, 1, 0), r"blocks\.3 was called when blocks\.0 was expected"),
        ((0, 1, 2), r"ended without calling blocks\.3"),
        ((0, 1, 2, 3, 3), r"blocks\.3 was called twice in one step"),
    ],
    ids=str,
)
def test_steps_that_do_not_call_each_block_once_in_order_are_refused_by_name(order, message):
    model = Ordered()
    model.order = order
    with pytest.raises(RuntimeError, match=message):
        stages(model, (2, 2), torch.ones(2, 3).double())


def test_a_skip_connection_may_start_at_the_cut_and_not_before_it():
    class Skipping(Chain):
        def forward(self, x):
            outputs = [x := block(x) for block in self.blocks]
            return self.head(outputs[1] + x).mean()

    x = torch.ones(2, 3).double()
    with pytest.raises(AbsentValueError, match=r"returns reads a value of blocks\.1"):
        stages(Skipping(), (3, 1), x)
    torch.testing.assert_close(stages(Skipping(), (2, 2), x)[2][-1][1].output, Skipping()(x))


def test_other_shapes_than_in_the_probe_are_refused():
    cuts, plans, _ = stages(Chain(), (2, 2), torch.ones(2, 3).double())
    with pytest.raises(RuntimeError, match=r"blocks\.2 is given \[3, 3\].* in the probe .* \[2, 3\]"):
        StageRun(cuts[0], 0, plans[0], []).run(lambda: cuts[0].root(torch.ones(3, 3).double()))
    with pytest.raises(RuntimeError, match=r"blocks\.2 takes \[2, 3\] where stage 0 sent \[3, 3\]"):
        StageRun(cuts[1], 1, plans[1], [torch.ones(3, 3)]).run(lambda: cuts[1].root(torch.ones(2, 3).double()))


def test_no_run_stays_active_after_an_error_and_excepts_do_not_catch_the_way_out():
    class Catching(Chain):
        def forward(self, x):
            try:
                return super().forward(x)
            except Exception:
                return None

    cuts, _, ends = stages(Catching(), (2, 2), torch.ones(2, 3).double())
    assert ends[-1][1].output is not None
    with pytest.raises(ZeroDivisionError):
        StageRun(cuts[0], 0, Plan("key"), []).run(lambda: 1 / 0)
    assert cuts[0].keeper.active is None
