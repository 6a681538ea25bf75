"""The bias that balances: which forwards it counts, when it moves, and with whom it shares."""

import copy
import gc
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.experts import LossFree, loss_free, share_counts
from tests.launch import run_ranks, run_trainers
from tests.small import WIDTH, Block, Small, hybrid, loader, trainer_of

DIM, EXPERTS, SPEED = 4, 3, 2**-6  # biases stay far below the scores of the tests' tokens


def router_of(**options):
    return LossFree(DIM, EXPERTS, top_k=1, speed=SPEED, **options)


def choose(router, *experts):
    """A forward of one token for each of these experts, with a loss."""
    with torch.no_grad():
        router.weight.copy_(torch.eye(EXPERTS, DIM) * 100)
    x = torch.eye(EXPERTS, DIM)[list(experts)]
    return router(x).weights.sum() + router.weight.sum() * 0


def step(*routers):
    torch.optim.SGD([parameter for router in routers for parameter in router.parameters()], 0.0).step()


def bias_of(router):
    return (router.bias / SPEED).tolist()


def test_a_bias_moves_after_each_step_by_the_counts_since_the_last():
    router = router_of()
    choose(router, 0, 0, 0, 1, 2, 2).backward()
    assert bias_of(router) == [0, 0, 0]
    step(router)
    assert bias_of(router) == [-1, 1, 0]
    step(router)
    assert bias_of(router) == [-1, 1, 0]
    choose(router, 2, 2)
    step(router)
    assert bias_of(router) == [0, 2, -1]


def test_all_forwards_of_an_accumulation_window_count():
    router = router_of()
    for experts in ([0, 0], [1, 1], [1, 2, 2, 2]):
        choose(router, *experts).backward()
    assert router.counts.tolist() == [2, 3, 3]
    step(router)
    assert bias_of(router) == [1, -1, -1]
    assert router.counts is None


def test_evaluation_does_not_count():
    router = router_of().eval()
    choose(router, 0, 0)
    router.train()
    step(router)
    assert bias_of(router) == [0, 0, 0]
    choose(router, 1)
    router.eval()
    choose(router, 0, 0, 0)
    step(router)
    assert bias_of(router) == [1, -1, 1]


def test_passes_of_a_strategy_that_train_nothing_do_not_count():
    router = router_of()
    choose(router, 0, 0)
    router.reduces = False
    choose(router, 1)
    router.reduces = True
    router.start_window()
    assert router.counts.tolist() == [2, 0, 0]


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_recomputation_does_not_count_again(is_reentrant):
    router = router_of()
    x = torch.eye(DIM)[:EXPERTS].repeat(2, 1).requires_grad_()
    weights = checkpoint(lambda x: router(x).weights, x, use_reentrant=is_reentrant)
    assert router.counts.sum() == 6
    weights.sum().backward()
    assert router.counts.sum() == 6


def test_the_counts_of_a_skipped_step_go_to_the_next():
    router = router_of()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.SGD(router.parameters(), 0.0)
    for experts, factor in (([0, 0, 0], float("inf")), ([1, 2], 1.0)):
        assert bias_of(router) == [0, 0, 0]
        optimizer.zero_grad()
        scaler.scale(choose(router, *experts) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert bias_of(router) == [-1, 1, 1]  # 3, 1, 1


def test_of_two_optimizers_the_first_to_step_takes_the_counts():
    router, other = router_of(), nn.Linear(2, 2)
    choose(router, 0).backward()
    step(other)
    assert bias_of(router) == [-1, 1, 1]
    step(router)
    assert bias_of(router) == [-1, 1, 1]


def test_an_optimizer_that_calls_the_model_itself_moves_the_bias_once():
    router = router_of()
    optimizer = torch.optim.LBFGS(router.parameters(), 0.0, max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = choose(router, 0, 1, 1)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert bias_of(router) == [0, -1, 1]


def pickled(router):
    return pickle.loads(pickle.dumps(router))


def saved(router):
    file = io.BytesIO()
    torch.save(router, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])
def test_copies_count_for_themselves(copied):
    router = router_of()
    choose(router, 0, 0, 1)
    twin = copied(router)
    assert twin.counts is None
    choose(twin, 2)
    step(router)
    assert bias_of(router) == [-1, 0, 1]
    assert bias_of(twin) == [1, 1, -1]
    choose(twin, 2)
    step(twin)
    assert bias_of(twin) == [2, 2, -2]
    assert bias_of(router) == [-1, 0, 1]


def test_a_router_that_nobody_holds_is_forgotten():
    router = router_of()
    choose(router, 0)
    gc.collect()
    before = len(loss_free._joined)
    del router
    gc.collect()
    assert len(loss_free._joined) == before - 1


@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.bfloat16, lambda module: module.to(torch.bfloat16)])
def test_the_bias_stays_float32_when_the_model_is_cast(cast):
    model = nn.Sequential(router_of())
    choose(model[0], 0)
    step(model)
    model[0].speed = SPEED / 512  # too small to move a bfloat16 of SPEED
    cast(model)
    assert model[0].weight.dtype != torch.float32
    model[0](torch.eye(DIM)[:1].to(model[0].weight.dtype))
    step(model)
    assert model[0].bias.dtype == torch.float32
    assert bias_of(model[0]) == [-1 - 1 / 512, 1 + 1 / 512, 1 + 1 / 512]
    assert model.double()[0].bias.dtype == torch.float64


def test_the_bias_is_saved_and_the_counts_are_not():
    router, other = router_of(), router_of()
    choose(router, 0)
    step(router)
    choose(router, 1)
    assert set(router.state_dict()) == {"weight", "bias"}
    other.load_state_dict(router.state_dict())
    assert bias_of(other) == [-1, 1, 1]
    assert other.counts is None


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler of torch looks at it, and cannot hide that
def test_compiled_routers_count():
    router = router_of()
    compiled = torch.compile(router, backend="eager")
    x = torch.eye(DIM)[:EXPERTS]
    for _ in range(2):
        compiled(x[:1] * 100)
    assert router.counts.sum() == 2
    step(router)
    assert router.bias.abs().sum() == 3 * SPEED


def test_loads_become_even_under_a_bias_alone():
    torch.manual_seed(0)
    router = LossFree(8, 6, top_k=2, speed=0.005)
    with torch.no_grad():
        router.weight[0] += 0.5  # with tokens around 1, one expert that all like
    x = 1 + torch.randn(600, 8)

    def loads():
        return router.eval()(x).experts.bincount(minlength=6).float()

    before = loads()
    for _ in range(400):
        router.train()(x)
        step(router)
    after = loads()
    assert before.max() / before.mean() > 2
    assert after.max() / after.mean() < 1.1
    assert after.min() / after.mean() > 0.9


class Routed(Block):
    def __init__(self):
        super().__init__()
        self.router = LossFree(WIDTH, EXPERTS, top_k=1, speed=SPEED)

    def forward(self, x):
        found = self.router(x)
        return super().forward(x * (1 + found.weights[:, None]))


class Mixture(Small):
    block, depth = Routed, 2


@pytest.mark.parametrize("accumulate", [1, 2])
def test_lightning_moves_the_bias_once_a_step(accumulate):
    seen = []

    class Seen(Mixture):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            seen.append([block.router.counts.sum().item() for block in self.blocks])
            return loss

        def validation_step(self, batch, batch_idx):
            self.loss(batch)

    model = Seen()
    trainer = trainer_of(max_epochs=1, accumulate_grad_batches=accumulate, num_sanity_val_steps=1)
    trainer.fit(model, loader(16, 4), loader(8, 4))
    assert seen == [[4 * (1 + i % accumulate)] * 2 for i in range(4)]
    for block in model.blocks:
        assert (block.router.bias / SPEED).abs().max() <= 4 / accumulate
        assert block.router.counts is None


def shared_counts():
    """Two routers, made in another order on each rank; on rank 1 one of them does not run."""
    rank = dist.get_rank()
    routers = {}
    for name in ("first", "second")[:: 1 if rank == 0 else -1]:
        routers[name] = router_of()
        routers[name].name, routers[name].balance_group = name, dist.group.WORLD
    choose(routers["first"], *([0, 0] if rank == 0 else [1, 1, 1, 1]))
    if rank == 0:
        choose(routers["second"], 0, 2, 2)
    step(*routers.values())
    shared = {name: bias_of(router) for name, router in routers.items()}
    twin = copy.deepcopy(routers["first"])  # a group cannot be copied
    assert twin.balance_group is None
    routers["first"].balance_group = None
    choose(routers["first"], rank)
    step(*routers.values())
    return shared, bias_of(routers["first"]), bias_of(routers["second"])


def test_a_group_sums_its_counts_in_the_order_of_names():
    shared = {"first": [0, -1, 1], "second": [0, 1, -1]}  # 2, 4, 0 and 1, 0, 2
    alone = [[-1, 0, 2], [1, -2, 2]]
    assert run_ranks(2, shared_counts) == [(shared, first, shared["second"]) for first in alone]


def counted_messages():
    routers = [router_of() for _ in range(3)]
    share_counts(nn.ModuleList(routers), dist.group.WORLD)
    calls = []
    original = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (calls.append(args[0].numel()), original(*args, **kwargs))
    try:
        for router in routers[: 1 + dist.get_rank()]:
            choose(router, 0)
        step(*routers)
    finally:
        dist.all_reduce = original
    assert [router.name for router in routers] == ["0", "1", "2"]
    return calls, [bias_of(router) for router in routers]


def test_all_routers_of_a_group_share_one_message():
    moved, still = [-1, 1, 1], [0, 0, 0]
    assert run_ranks(2, counted_messages) == [([3 * EXPERTS], [moved, moved, still])] * 2


def balanced(pipeline, data, zero_stage):
    """Counts before each step and biases after a fit, of the routers that this rank trains; replicas share counts."""
    model, counts = Mixture(), []
    routers = [block.router for block in model.blocks]
    routers = routers if pipeline == 1 else [routers[dist.get_rank()]]

    class Share(Callback):
        def on_train_start(self, trainer, module):
            if dist.is_initialized():  # over a pipeline, routers of another rank's stage are in the group too
                share_counts(module, dist.group.WORLD if data > 1 else dist.new_subgroups(1)[0])

        def on_train_end(self, trainer, module):
            share_counts(module, None)

        def on_before_optimizer_step(self, trainer, module, optimizer):
            counts.append([router.counts.tolist() for router in routers])

    strategy = hybrid(pipeline, zero_stage=zero_stage) if pipeline * data > 1 else "auto"
    trainer = trainer_of(strategy, callbacks=[Share()], accumulate_grad_batches=2)
    trainer.fit(model, loader(112, 8, data))
    assert [router.counts for router in routers] == [None] * len(routers)
    return torch.tensor(counts), torch.stack([router.bias for router in routers])


def balanced_in_layouts():
    return [balanced(2, 1, 1), *(balanced(1, 2, stage) for stage in (0, 1, 2, 3))]


def test_every_layout_counts_each_token_once():
    counts, biases = balanced(1, 1, 0)
    assert counts.shape == (7, 2, EXPERTS)
    assert (counts.sum(2) == 16).all()
    first, second = run_trainers(2, balanced_in_layouts)
    assert torch.equal(torch.cat([first[0][0], second[0][0]], 1), counts)
    assert torch.equal(torch.cat([first[0][1], second[0][1]]), biases)
    for one, other in zip(first[1:], second[1:], strict=True):
        assert torch.equal(one[0] + other[0], counts)
        assert torch.equal(one[1], biases)
        assert torch.equal(other[1], biases)
