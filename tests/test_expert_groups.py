"""What a layer counts over groups of tokens is the same wherever the groups are: in replicas, or in micro-batches."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader

from lightning_hybrid.experts import ExpertChoice, GShard, LossFree, MoELayer, NoisyTopK, Switch, TopK
from tests.launch import run_trainers
from tests.small import WIDTH, hybrid, trainer_of, weights
from tests.test_expert_parity import CLIP, NUM_EXPERTS, Mixtures, data

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is not causal", "ignore:.*expert.choice", "ignore:tensor_parallel_size=2"
)
BATCHES, BATCH = 4, 8
KINDS = {  # a router, how the layer drops and balances, and whether its groups are those of a replica's micro-batch
    "dropping": (TopK, {"capacity_factor": 0.75}, True),
    "switch": (partial(Switch, top_k=1), {"capacity_factor": 1.0, "capacity_rounding": "ceil"}, True),
    "gshard": (GShard, {"capacity_factor": 1.0, "min_capacity": 1}, False),
    "noisy": (NoisyTopK, {"capacity_factor": 1.25}, True),
    "expert choice": (partial(ExpertChoice, groups="all"), {}, True),
    "expert choice of sequences": (ExpertChoice, {}, False),
    "micro_batch": (TopK, {"balance_over": "micro_batch"}, False),
    "global": (TopK, {"balance_over": "global"}, False),
    "loss-free": (partial(LossFree, speed=0.05), {"balance_loss": 0.0}, False),
}


class Grouped(Mixtures):
    """Its layers have one kind of router, whose noise is a function of what it is added to."""

    def __init__(self, kind):
        self.kind = kind
        self.block = partial(Residual, kind)
        super().__init__()

    def training_step(self, batch, batch_idx):
        def noise(tensor):
            return torch.sin(37 * tensor.detach() + torch.arange(len(tensor)).view(-1, *[1] * (tensor.ndim - 1)) % 3)

        with patch.object(torch, "randn_like", noise), patch.object(torch, "rand_like", lambda t: noise(t).abs()):
            return super().training_step(batch, batch_idx)


class Residual(nn.Module):
    def __init__(self, kind):
        super().__init__()
        router, options, _ = KINDS[kind]
        made = router(WIDTH, NUM_EXPERTS)
        for parameter in made.parameters():
            nn.init.normal_(parameter)
        self.mixture = MoELayer(WIDTH, 5, NUM_EXPERTS, made, **{"balance_loss": 0.3, **options})

    def forward(self, x):
        return x + self.mixture(x)


def share(rank, replicas):
    """A replica's consecutive part of each batch: as one of so many micro-batches has it."""
    x, y = data(BATCHES * BATCH).tensors
    parts = [
        (x[i : i + BATCH].chunk(replicas)[rank], y[i : i + BATCH].chunk(replicas)[rank])
        for i in range(0, len(x), BATCH)
    ]
    return DataLoader(parts, batch_size=None)


def fit(kind, microbatches=1, **options):
    options = {"pipeline": 1, **options}
    replicas = dist.get_world_size() // options["pipeline"] // options.get("tensor_parallel_size", 1)
    rank = dist.get_rank() // options.get("tensor_parallel_size", 1) % replicas
    trainer = trainer_of(
        hybrid(microbatches=microbatches, **options),
        accumulate_grad_batches=2,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
    )
    trainer.fit(Grouped(kind), share(rank, replicas))
    return dict(weights(trainer))


def fit_all(tasks):
    return [fit(kind, **options) for kind, options in tasks]


LAYOUTS = {
    2: [{"zero_stage": 0}, {"zero_stage": 3, "expert_parallel_size": 2}],
    4: [{"zero_stage": 1, "pipeline": 2, "expert_parallel_size": 2}],
}


def test_groups_are_the_same_in_replicas_and_in_micro_batches():
    alone = [(kind, {"microbatches": 2 if of_replica else 1}) for kind, (*_, of_replica) in KINDS.items()]
    otherwise = [(kind, {"microbatches": 1}) for kind, (*_, of_replica) in KINDS.items() if of_replica]
    (found,) = run_trainers(1, fit_all, [*alone, *otherwise])
    expected = dict(zip(KINDS, found[: len(alone)], strict=True))
    for (kind, _), other in zip(otherwise, found[len(alone) :], strict=True):
        assert any((other[n] - expected[kind][n]).abs().max() > 1e-4 for n in other), f"{kind} does not heed its groups"
    for size, layouts in LAYOUTS.items():
        tasks = [(kind, options) for kind in KINDS for options in layouts]
        for (kind, options), found in zip(tasks, run_trainers(size, fit_all, tasks, timeout=400)[0], strict=True):
            close = {"rtol": 1e-9, "atol": 1e-12}
            assert_close(found, expected[kind], **close, msg=lambda t, k=kind, o=options: f"{k}, {o}: {t}")
