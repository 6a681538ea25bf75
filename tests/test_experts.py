"""Experts over several ranks where tokens, batches and options are not even."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid.experts import MoELayer
from lightning_hybrid.parallel.experts.parallel import ExpertParallel
from lightning_hybrid.parallel.mesh import Layout, Mesh
from tests.launch import run_ranks, run_trainers
from tests.small import WIDTH, Small, hybrid, trainer_of, weights
from tests.test_expert_parity import CLIP, NUM_EXPERTS, Mixtures, data, loader

EP = {"pipeline": 1, "microbatches": 1, "expert_parallel_size": 2}
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


class Crowded(Mixtures):
    """All tokens go to the first two experts, which one rank has."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.mixture.router.weight.data[:2] += 50 * torch.sign(self.inlet.bias.data)
            self.inlet.bias.data += 3 * torch.sign(self.inlet.bias.data)

    def on_train_end(self):
        for block in self.blocks:
            counts = block.mixture.statistics.counts.tolist()
            assert min(counts[:2]) > 0 == sum(counts[2:]), f"{counts} tokens: the other rank was to get none"


class Evaluated(Mixtures):
    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


def uneven(samples, rank, replicas, sizes):
    """Batches of `sizes`, each cut into parts that differ by one, the last maybe empty."""
    batches, begin = [], 0
    for size in sizes:
        x, y = samples.tensors[0][begin : begin + size], samples.tensors[1][begin : begin + size]
        batches.append((x.tensor_split(replicas)[rank], y.tensor_split(replicas)[rank]))
        begin += size
    return DataLoader(batches, batch_size=None)


def fit(module, options, sizes, **trainer_options):
    strategy = hybrid(**options) if options is not None else "auto"
    replicas = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if replicas > 1 else 0
    trainer = trainer_of(strategy, gradient_clip_val=CLIP, use_distributed_sampler=False, **trainer_options)
    trainer.fit(module(), uneven(data(sum(sizes)), rank, replicas, sizes))
    return trainer.callback_metrics["loss"], dict(weights(trainer))


def fit_all(tasks):
    return [fit(*task) for task in tasks]


TASKS = [
    (Crowded, EP, (8, 8)),
    (Crowded, {**EP, "zero_stage": 3}, (8, 8)),
    (Mixtures, EP, (7, 3, 5)),
    (Mixtures, {**EP, "zero_stage": 3, "microbatches": 2}, (7, 3, 5)),
    (Mixtures, {**EP, "zero_stage": 2}, (5, 1, 8)),
]


def test_tokens_and_batches_may_be_uneven():
    """A rank without tokens, batches of other sizes on each replica, and one replica without any sample."""
    outcomes = run_trainers(2, fit_all, TASKS, timeout=120)
    for index, (module, options, sizes) in enumerate(TASKS):
        found, expected = outcomes[0][index], fit(module, None, sizes)
        assert_close(found, expected, **CLOSE, msg=lambda text, o=options, s=sizes: f"{o}, {s}: {text}")


def evaluate(options):
    """Loss before and after a short fit, over samples that the replicas do not have alike, and predictions."""
    trainer = trainer_of(hybrid(**options) if options is not None else "auto")
    replicas = dist.get_world_size() // options["pipeline"] if options is not None else 1
    rank = dist.get_rank() % replicas if replicas > 1 else 0
    module, samples = Evaluated(), data(5)
    (before,) = trainer.validate(module, DataLoader(samples, 2))
    trainer.fit(module, loader(data(8), rank, replicas), DataLoader(samples, 2))
    after = trainer.callback_metrics["val"]
    return (
        torch.tensor(before["val"], dtype=torch.float64),
        after,
        torch.cat(trainer.predict(module, DataLoader(samples, 2))),
    )


def evaluate_all(tasks):
    return [evaluate(options) for options in tasks]


EVALUATED = {
    2: [EP, {**EP, "zero_stage": 3}],
    4: [{**EP, "zero_stage": 1, "expert_parallel_size": 4}, {**EP, "pipeline": 2, "microbatches": 2}],
}


@pytest.mark.parametrize("size", EVALUATED)
def test_evaluation_counts_each_sample_once_where_replicas_have_not_equally_many(size):
    expected = evaluate(None)
    for options, found in zip(EVALUATED[size], run_trainers(size, evaluate_all, EVALUATED[size])[0], strict=True):
        assert_close(found, expected, **CLOSE, msg=lambda text, o=options: f"{o}: {text}")


class Fused(Mixtures):
    """All parameters in one group of an optimizer that goes over lists of them."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.02, fused=True)


class OnMeta(Fused):
    """Made where it is needed."""

    def __init__(self):
        super().__init__()
        self.blocks = None

    def configure_model(self):
        if self.blocks is None:
            with torch.device("meta"):
                self.blocks = nn.ModuleList(self.block() for _ in range(self.depth)).double()


class Narrow(Mixtures):
    """In the precision of the Trainer, with steps as long as gradients."""

    def __init__(self):
        super().__init__()
        self.float()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Aligned(nn.Module):
    """Experts of sizes that are computed together, and an error if they are not."""

    def __init__(self):
        super().__init__()
        self.mixture = MoELayer(8, 12, NUM_EXPERTS, shared_experts=1, balance_loss=0.3, implementation="grouped")

    def forward(self, x):
        return x + self.mixture(F.pad(x, (0, 2)))[..., :WIDTH]


class NarrowAligned(Narrow):
    block = Aligned


OPTIONS = [  # module, precision, options; the first of each module and precision is what the others must equal
    (Fused, "64-true", {"zero_stage": 0}),
    (Fused, "64-true", {"zero_stage": 1, **EP}),
    (Fused, "64-true", {"zero_stage": 3, **EP}),
    (Fused, "64-true", {"zero_stage": 2, "accumulate_on_cpu": True, **EP}),
    (OnMeta, "64-true", {"zero_stage": 0}),
    (OnMeta, "64-true", {"zero_stage": 0, **EP}),
    (OnMeta, "64-true", {"zero_stage": 3, **EP}),
    (Narrow, "32-true", {"zero_stage": 0}),
    (Narrow, "32-true", {"zero_stage": 2, **EP}),
    (NarrowAligned, "32-true", {"zero_stage": 0}),
    (NarrowAligned, "32-true", {"zero_stage": 0, **EP}),
    (NarrowAligned, "32-true", {"zero_stage": 3, **EP}),
    (Narrow, "bf16-true", {"zero_stage": 0}),
    (Narrow, "bf16-true", {"zero_stage": 0, **EP}),
    (Narrow, "bf16-true", {"zero_stage": 3, **EP}),
    (Narrow, "16-true", {"zero_stage": 2}),
    (Narrow, "16-true", {"zero_stage": 2, **EP}),
    (Narrow, "bf16-mixed", {"zero_stage": 1}),
    (Narrow, "bf16-mixed", {"zero_stage": 1, **EP}),
]
# three steps of 0.1; gradients are below 1 and differ by the order of sums of at most 24 numbers in the compute type
BOUNDS = {"64-true": 1e-12, "32-true": 1e-6, "bf16-true": 2e-3, "16-true": 5e-4, "bf16-mixed": 2e-3}


def fit_options(tasks):
    found = []
    for module, precision, options in tasks:
        trainer = trainer_of(
            hybrid(**{"pipeline": 1, "microbatches": 1, **options}), precision=precision, gradient_clip_val=CLIP
        )
        samples = [t if precision == "64-true" else t.float() for t in data(24).tensors]
        trainer.fit(module(), loader(TensorDataset(*samples), dist.get_rank(), 2))
        found.append({name: weight.double() for name, weight in weights(trainer).items()})
    return found


def test_options_of_other_axes_keep_the_numbers():
    """Optimizers over lists of tensors, the meta device, accumulation on the host, and 16 bits."""
    outcomes, first = run_trainers(2, fit_options, OPTIONS, timeout=200)[0], {}
    for (module, precision, options), found in zip(OPTIONS, outcomes, strict=True):
        expected = first.setdefault((module, precision), found)
        close = {"rtol": 0, "atol": BOUNDS[precision]}
        assert_close(found, expected, **close, msg=lambda t, o=options, p=precision: f"{p}, {o}: {t}")


def fit_sequences(tasks):
    found = []
    for options in tasks:
        trainer = trainer_of(hybrid(pipeline=1, microbatches=1, tensor_parallel_size=2, **options))
        trainer.fit(Mixtures(), loader(data(24), dist.get_rank() // 2, 2))
        found.append(dict(weights(trainer)))
    return found


@pytest.mark.filterwarnings("ignore:.*It has no rule for parts", "ignore:tensor_parallel_size=2 splits nothing")
def test_sequence_shards_are_made_whole_for_routers():
    tasks = [{"expert_parallel_size": 2, "sequence_parallel": sequence} for sequence in (False, True, "regather")]
    first, *others = run_trainers(4, fit_sequences, tasks)[0]
    for found in others:
        assert_close(found, first, **CLOSE)


class ByHand(Mixtures):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


REFUSED = [
    (Mixtures, {"expert_parallel_size": 3}, "expert_parallel_size=3 does not divide the data axis: 2 processes with"),
    (Mixtures, {"expert_parallel_size": 2, "replicate_size": 2}, "replicate_size=2 leaves 1 in each"),
    (Mixtures, {"expert_parallel_size": 2, "pipeline": 2}, "a divisor of 1, or give pipeline_parallel_size=1"),
    (Small, EP, "expert_parallel_size=2 splits experts, and the model has none that are known"),
    (ByHand, EP, "automatic_optimization=False with expert_parallel_size=2"),
]


def refuse_all(cases):
    said = []
    for module, options, _ in cases:
        trainer = trainer_of(hybrid(**{"pipeline": 1, "microbatches": 1, **options}))
        with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared by the caller)
            trainer.fit(module(), loader(data(8)))
        said.append(str(caught.value))
    return said


def fit_with_two_trainers(kind, options):
    module, said = kind(), []
    for _ in range(2):
        trainer = trainer_of(hybrid(**{"pipeline": 1, "microbatches": 1, "zero_stage": 0, **options}), max_steps=1)
        try:
            trainer.fit(module, loader(data(8)))
        except RuntimeError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Mixtures, {"expert_parallel_size": 2}),
        (Small, {"tensor_parallel_size": 2, "tensor_parallel_plan": {"linear": "rowwise"}}),
    ],
)
def test_a_model_that_is_split_is_refused_by_another_trainer(kind, options):
    """It would give all ranks what the first has of it."""
    for said in run_trainers(2, fit_with_two_trainers, kind, options):
        assert len(said) == 1
        assert "was cut, split or sharded by another Trainer" in said[0]


def show():
    mesh = Mesh(Layout(1, 2, expert=2), device=torch.device("cpu"))
    return ExpertParallel(Mixtures(), mesh).table()


def test_it_is_told_what_is_split():
    wanted = "experts: 2 x Experts, 4 experts each and 2 of them on a rank, blocks.0.mixture.experts to blocks.1"
    assert run_ranks(2, show) == [f"{wanted}.mixture.experts"] * 2


def test_what_cannot_be_split_is_refused_before_training():
    for said in run_trainers(2, refuse_all, REFUSED):
        for text, (_, _, wanted) in zip(said, REFUSED, strict=True):
            assert wanted in text
    with pytest.raises(ValueError, match="expert_parallel_size=0 must be a whole number of at least 1"):
        hybrid(expert_parallel_size=0)
