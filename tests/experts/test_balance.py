"""Losses that a layer adds by itself: which fractions they have, and that each counts once."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_hybrid.experts import MoELayer
from lightning_hybrid.experts.balance import balance_loss
from tests.launch import run_ranks

DIM, EXPERTS, COEFFICIENT = 8, 4, 0.5
OVER = ["sequence", "micro_batch", "global"]


def layer_of(over="sequence", **options):
    torch.manual_seed(0)
    return MoELayer(DIM, 16, EXPERTS, **({"balance_loss": COEFFICIENT, "balance_over": over} | options)).double()


def batches(number, seed=1, sequences=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(sequences, 5, DIM, generator=generator, dtype=torch.float64) for _ in range(number)]


def choices(layer, x):
    """Numbers of pairs of each sequence, [S, E], and probabilities, [S, L, E]: what the layer's router says."""
    with torch.no_grad():
        chosen = layer.router(x.view(-1, DIM)).experts.view(-1, *x.shape[:2])
    counts = torch.stack([chosen[:, s].flatten().bincount(minlength=EXPERTS) for s in range(len(x))])
    return counts, (x @ layer.router.weight.T).softmax(-1)


def literal_loss(layer, x, counts=None):
    """The loss, pair by pair of the formula; with fractions of other counts, [E], if they are given."""
    per_sequence, probabilities = choices(layer, x)
    total = 0
    for s in range(len(x)):
        pairs = per_sequence[s] if counts is None else counts
        for e in range(EXPERTS):
            total = total + pairs[e] / pairs.sum().double() * probabilities[s, :, e].mean() / len(x)
    return COEFFICIENT * EXPERTS * total


def gradients(layer):
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    layer.zero_grad()
    return found


def expected(layer, xs, losses):
    """Gradients of the layer's own output and these losses, with nothing that adds itself."""
    plain = copy.deepcopy(layer)
    plain.coefficient = 0.0
    for x, loss in zip(xs, losses, strict=True):
        (plain(x).square().sum() + loss(plain)).backward()
    return gradients(plain)


def check_equal(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("num_runs", [1, 3])
def test_the_loss_has_the_gradient_of_its_formula(num_runs):
    probabilities = torch.rand(6, EXPERTS, dtype=torch.float64, requires_grad=True)
    counts = torch.randint(5, (num_runs, EXPERTS))
    counts[0] = 0  # no pair at all
    fractions = counts / counts.sum(-1, keepdim=True).clamp_min(1).double()
    literal = EXPERTS * (fractions * probabilities.view(num_runs, -1, EXPERTS).mean(1)).sum(-1).mean()
    found = balance_loss(probabilities, counts)
    check_equal(found, literal)
    check_equal(torch.autograd.grad(found, probabilities), torch.autograd.grad(literal, probabilities))


def test_even_routing_has_a_loss_of_one_and_no_tokens_have_none():
    assert balance_loss(torch.full((8, 4), 0.25), torch.full((2, 4), 3)).item() == 1
    nothing = torch.zeros(0, 4, requires_grad=True)
    loss = balance_loss(nothing, torch.zeros(1, 4, dtype=torch.int64))
    loss.backward()
    assert (loss.item(), nothing.grad.shape) == (0, (0, 4))


def test_sequences_have_fractions_of_their_own():
    layer, (x,) = layer_of(), batches(1)
    wanted = expected(layer, [x], [lambda plain: literal_loss(plain, x)])
    layer(x).square().sum().backward()
    check_equal(gradients(layer), wanted)
    assert layer.statistics.losses == {"balance": pytest.approx(literal_loss(layer, x).item(), rel=1e-12)}


def test_the_mean_over_parts_of_a_batch_is_that_of_the_whole():
    layer, (x,) = layer_of(), batches(1)
    whole = literal_loss(layer, x)
    parts = literal_loss(layer, x[:2]) * 2 / 3 + literal_loss(layer, x[2:]) / 3
    check_equal(parts, whole)


def test_a_matrix_is_one_sequence_and_microbatches_without_replicas_too():
    for layer in (layer_of(), layer_of("micro_batch")):
        (x,) = batches(1, sequences=1)
        wanted = expected(layer, [x], [lambda plain: literal_loss(plain, x)])  # noqa: B023
        layer(x[0]).square().sum().backward()
        check_equal(gradients(layer), wanted)


def test_fractions_are_counted_before_dropping():
    layer, (x,) = layer_of(capacity_factor=0.5), batches(1)
    wanted = expected(layer, [x], [lambda plain: literal_loss(plain, x)])
    layer(x).square().sum().backward()
    check_equal(gradients(layer), wanted)
    assert layer.statistics.counts.sum() == 2 * 15
    assert 0 < layer.statistics.dropped.sum() < 2 * 15


def test_global_counts_go_on_until_the_optimizer_steps():
    layer, xs = layer_of("global"), batches(3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    counts = [choices(layer, x)[0].sum(0) for x in xs]
    so_far = [counts[0], counts[0] + counts[1], counts[2]]
    losses = [lambda plain, x=x, c=c: literal_loss(plain, x, c) for x, c in zip(xs, so_far, strict=True)]
    wanted = expected(layer, xs, losses)
    for number, x in enumerate(xs):
        layer(x).square().sum().backward()
        if number == 1:
            optimizer.step()
    check_equal(gradients(layer), wanted)


def test_a_window_can_be_begun_by_hand():
    layer, xs = layer_of("global"), batches(2)
    counts = [choices(layer, x)[0].sum(0) for x in xs]
    losses = [lambda plain, x=x, c=c: literal_loss(plain, x, c) for x, c in zip(xs, counts, strict=True)]
    wanted = expected(layer, xs, losses)
    for x in xs:
        layer.start_window()
        layer(x).square().sum().backward()
    check_equal(gradients(layer), wanted)


@pytest.mark.parametrize("options", [{}, {"capacity_factor": 1.0, "shared_experts": 1}], ids=str)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("backward", ["at once", "in order", "reversed"])
def test_recomputation_counts_nothing_twice(over, reentrant, backward, options):
    """With micro-batches in flight, as in a pipeline: at its backward pass, later ones have been counted."""
    layer, xs = layer_of(over, **options), [x.requires_grad_() for x in batches(3)]
    twin = copy.deepcopy(layer)

    def train(module, run):
        outs = []
        for x in xs:
            outs.append(run(module, x * 1).square().sum())
            if backward == "at once":
                outs.pop().backward()
        for out in reversed(outs) if backward == "reversed" else outs:
            out.backward()
        return gradients(module)

    wanted = train(twin, lambda module, x: module(x))
    check_equal(train(layer, lambda module, x: checkpoint(module, x, use_reentrant=reentrant)), wanted)
    assert layer.statistics.num_passes == 3
    assert layer.statistics.num_tokens == 45
    check_equal(vars(layer.statistics), vars(twin.statistics))


def test_equal_choices_in_flight_are_recalled_in_order():
    layer, (x, y) = layer_of("global"), batches(2)
    xs = [x.requires_grad_(), y.requires_grad_(), x]
    twin = copy.deepcopy(layer)
    for module, run in ((twin, lambda m, x: m(x)), (layer, lambda m, x: checkpoint(m, x * 1, use_reentrant=True))):
        for out in [run(module, x).square().sum() for x in xs]:
            out.backward()
    check_equal(gradients(layer), gradients(twin))


def test_a_step_of_another_optimizer_leaves_a_pass_its_counts():
    """With two optimizers, one may step between the other's forward and backward passes."""
    layer, (x,) = layer_of("micro_batch"), batches(1)
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    wanted = expected(layer, [x], [lambda plain: literal_loss(plain, x, choices(plain, x)[0].sum(0))])
    out = checkpoint(layer, x.requires_grad_() * 1, use_reentrant=True)
    other.step()
    out.square().sum().backward()
    check_equal(gradients(layer), wanted)
    checkpoint(layer, x * 1, use_reentrant=True)  # its backward pass never comes
    assert len(vars(layer)["_pairs"]._ahead) == 1
    for _ in range(2):
        other.step()
    assert not vars(layer)["_pairs"]._ahead


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("over", OVER)
def test_evaluation_and_passes_without_gradients_leave_no_trace(over):
    layer, xs = layer_of(over), batches(2)
    for x in xs:
        with torch.no_grad():
            layer(x)
            checkpoint(layer, x, use_reentrant=True)  # whose backward pass never comes
        layer.eval()(x).square().sum().backward()
        layer.train()
    assert layer.statistics.num_passes == 0
    found = gradients(layer)
    check_equal(found, expected(layer.eval(), xs, [lambda plain: 0] * 2))
    twin = layer_of(over)
    for module in (layer.train(), twin):
        module(xs[0]).sum().backward()
    check_equal(gradients(layer), gradients(twin))


@pytest.mark.parametrize("name", ["aux_loss", "auxiliary_loss", "balance_loss", "l_aux"])
def test_a_loss_added_by_hand_is_refused(name):
    layer = layer_of()
    with pytest.raises(RuntimeError, match="are part of the total already"):
        getattr(layer, name)
    with pytest.raises(RuntimeError, match="are part of the total already"):
        sum(module.aux_loss for module in [layer] if hasattr(module, "aux_loss"))


class Mixture(LightningModule):
    def __init__(self, coefficient):
        super().__init__()
        self.layer = layer_of(balance_loss=coefficient)
        self.seen = []

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def on_before_optimizer_step(self, optimizer):
        self.seen.append({name: parameter.grad.clone() for name, parameter in self.layer.named_parameters()})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def trained(coefficient, accumulate, folder):
    """Gradients at each step of the optimizer."""
    model = Mixture(coefficient)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, accumulate_grad_batches=accumulate, default_root_dir=folder, **quiet
    )
    trainer.fit(model, DataLoader(torch.cat(batches(2)), batch_size=3))
    return model.seen


def test_plain_lightning_divides_the_loss_and_not_what_adds_itself(tmp_path):
    """Without the strategy: under accumulation over n batches the coefficient is to be divided by n."""
    model, xs = Mixture(0.0), batches(2)
    for x in xs:
        ((model.training_step(x, 0) + literal_loss(model.layer, x)) / 2).backward()
    wanted = gradients(model.layer)
    check_equal(trained(COEFFICIENT / 2, 2, tmp_path), [wanted])
    for x in xs:
        (model.training_step(x, 0) + literal_loss(model.layer, x)).backward()
        wanted = gradients(model.layer)
    check_equal(trained(COEFFICIENT, 1, tmp_path)[1], wanted)


def replicas():
    """Every rank has its own sequences, one of them none in the second micro-batch."""
    rank = dist.get_rank()
    whole = batches(2, sequences=4)
    mine = [[x[:3], x[3:]][rank] for x in whole]
    mine[1] = [whole[1], whole[1][:0]][rank]
    for over in ("micro_batch", "global"):
        for run in (lambda m, x: m(x), lambda m, x: checkpoint(m, x.requires_grad_() * 1, use_reentrant=True)):
            layer, single = layer_of(over), layer_of(over)
            layer.balance_group = dist.group.WORLD
            outs = [run(layer, x).square().sum() / max(len(x), 1) for x in mine]
            for out, x, all_of_it in zip(outs, mine, whole, strict=True):
                layer.zero_grad()
                out.backward()
                for parameter in layer.parameters():
                    parameter.grad *= len(x) / 4  # the replica's share of the samples
                    dist.all_reduce(parameter.grad)
                (single(all_of_it.detach()).square().sum() / 4).backward()
                check_equal(gradients(layer), gradients(single))
    assert copy.deepcopy(layer).balance_group is layer.balance_group
    assert pickle.loads(pickle.dumps(layer)).balance_group is None
    layer.reduces = False
    layer.statistics.reset()
    if rank == 0:  # alone
        layer(mine[0]).sum().backward()
    assert layer.statistics.num_passes == 0
    return True


def test_replicas_count_together():
    assert run_ranks(2, replicas) == [True, True]
