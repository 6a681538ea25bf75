"""The loss scale: all ranks skip a step or none does, and neither weights nor counts move in a step that is skipped."""

import re
import warnings
from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from torch import nn
from torch.utils.data import DataLoader

from examples.gpt import GPT
from lightning_hybrid.parallel.gradients import local
from lightning_hybrid.precision import FP16MasterWeights
from tests.launch import run_trainers
from tests.precision.halves import BATCH, BATCHES, MODERATE, Half, Losses, bits
from tests.small import WIDTH, Small, fit, hybrid, loader, trainer_of, weights


def plugin(**options):
    return FP16MasterWeights(**{"init_scale": MODERATE, **options})


def alone(function, *args, timeout=120):
    """A fit makes a process group, which a test must not leave behind."""
    (found,) = run_trainers(1, function, *args, timeout=timeout)
    return found


class Poisoned(Half):
    """In given batches of the first epoch one number of one gradient overflows, on the last rank."""

    at = (1,)

    def on_after_backward(self):
        first = self.current_epoch == 0 and dist.get_rank() == dist.get_world_size() - 1
        if first and self.trainer.fit_loop.batch_idx in self.at:
            held = [p for p in self.trainer.strategy.assembly.engine.named_parameters().values() if p.grad is not None]
            held = [p for p in held if p.ndim and local(p.grad).numel()]
            gradient = local(held[0].grad)
            gradient[(0,) * gradient.ndim] = torch.inf

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 8)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class States(Callback):
    """After each batch: hash of the weights, scale, counts and learning rate."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        state, (group, *_) = trainer.precision_plugin.state, trainer.optimizers[0].param_groups
        counts = state.scale, state.clean_steps, state.applied, trainer.global_step, round(group["lr"] / Half.rate * 8)
        self.seen.append((bits(pl_module), counts))


def skipped(layout, folder):
    """All at once; up to the middle; from there on."""
    found = []
    for epochs, resume in ((2, None), (1, None), (2, folder / "middle.ckpt")):
        seen = States()
        trainer = trainer_of(hybrid(**layout), max_epochs=epochs, callbacks=[seen], plugins=[plugin(growth_interval=5)])
        data = dist.get_world_size() // layout["pipeline"]
        trainer.fit(Poisoned(), loader(BATCHES * BATCH, BATCH, data), ckpt_path=resume)
        if epochs == 1:
            trainer.save_checkpoint(folder / "middle.ckpt")
        found.append((seen.seen, weights(trainer)))
    return found


def test_an_overflow_on_one_rank_makes_all_skip_and_a_resumed_run_knows_of_it(tmp_path):
    """Cases 3 and 10."""
    half = MODERATE / 2
    # scale, clean steps, applied steps, global step, learning rate in units of the warm-up
    expected = [
        (MODERATE, 1, 1, 1, 2),
        (half, 0, 1, 1, 2),
        (half, 1, 2, 2, 3),
        (half, 2, 3, 3, 4),
        (half, 3, 4, 4, 5),
        (half, 4, 5, 5, 6),
        (MODERATE, 0, 6, 6, 7),
        (MODERATE, 1, 7, 7, 8),
    ]
    outcomes = run_trainers(4, skipped, {"pipeline": 2, "zero_stage": 1}, tmp_path, timeout=200)
    for whole, first, rest in outcomes:
        for seen in (whole[0], first[0] + rest[0]):
            assert [counts for _, counts in seen] == expected
            assert seen[1][0] == seen[0][0]
            assert seen[2][0] != seen[1][0]
        assert [hashes for hashes, _ in whole[0][4:]] == [hashes for hashes, _ in rest[0]]
    whole, _, rest = outcomes[0]
    assert all(torch.equal(value, rest[1][name]) for name, value in whole[1].items())


class AtOnce(Poisoned):
    at = (0, 2)


def saved(folder):
    keep = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*before.*optimizer.step")
        train = loader(BATCHES * BATCH, BATCH, 2)
        options = {"enable_checkpointing": True, "callbacks": [keep], "plugins": [plugin()]}
        trainer = fit(AtOnce(), train, hybrid(1), max_epochs=-1, max_steps=6, **options)
    return trainer.global_step, trainer.fit_loop.batch_idx, trainer.fit_loop.epoch_loop.total_batch_idx


def test_skipped_steps_are_neither_counted_nor_saved(tmp_path):
    """Case 10: no scheduler before the first step; `max_steps` are steps that were applied; each is saved once."""
    steps, _, batch = run_trainers(2, saved, tmp_path)[0]
    assert (steps, batch + 1) == (6, 8)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step={step}.ckpt" for step in range(1, 7)]


class Hopeless(Half):
    """The last layer's bias alone gets a gradient that is too large."""

    def loss(self, batch):
        return super().loss(batch) + 1e30 * self.outlet.bias.sum()


def hopeless(options):
    with pytest.raises(RuntimeError) as caught:
        fit(Hopeless(), loader(40 * BATCH, BATCH), hybrid(2), plugins=[FP16MasterWeights(**options)])
    return str(caught.value)


def test_a_scale_under_its_minimum_names_the_parameters_on_every_rank():
    for message in run_trainers(2, hopeless, {"init_scale": 8.0, "min_scale": 2.0}):
        pattern = r"fell to 1, under min_scale=2: gradients of outlet\.bias are not finite, after 0 applied steps"
        assert re.search(pattern, message)
    for message in run_trainers(2, hopeless_and_static):
        assert "100 steps in a row were skipped with loss_scale=8: gradients of outlet.bias" in message


def hopeless_and_static():
    with pytest.raises(RuntimeError) as caught:
        fit(Hopeless(), loader(101 * 2, 2), hybrid(2), plugins=[FP16MasterWeights(8.0)])
    return str(caught.value)


class Drift(LightningModule):
    """Each step moves the parameters by 2^-13 of themselves, which float16 rounds away."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def training_step(self, batch, batch_idx):
        return (self.weight * batch).sum() / 8

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 2.0**-13 * 8)


def drifted():
    model = Drift()
    trainer = fit(model, DataLoader(torch.ones(1000, 1), 1), hybrid(1, microbatches=1), precision="16-true")
    return weights(trainer)["weight"], trainer.precision_plugin.state.applied


def test_updates_below_the_resolution_of_16_bits_accumulate():
    found, applied = alone(drifted)
    assert applied == 1000
    torch.testing.assert_close(found, torch.full((4, 4), 1 - 1000 * 2.0**-13), rtol=0, atol=0)


class Slow(Half):
    rate = 1e-5


def five_hundred():
    seen = Losses()
    train = loader(500 * 4, 4)
    trainer = fit(Slow(), train, hybrid(1, microbatches=1), precision="16-true", callbacks=[seen])
    return seen.losses, weights(trainer), trainer.precision_plugin.state


def test_adamw_with_its_default_eps_stays_finite():
    """Case 36."""
    losses, state, scale = alone(five_hundred)
    assert all(torch.isfinite(value).all() for value in state.values())
    assert len(losses) == 500
    assert scale.applied >= 490
    start = Slow().state_dict()
    assert all(not torch.equal(state[name], start[name]) for name in state if not name.startswith("unused"))


def learned(precision, steps):
    torch.manual_seed(0)
    pattern = torch.randint(256, (8, 33)).repeat(steps, 1)
    seen = Losses()
    model = GPT(width=32, depth=2, heads=4, context=32, learning_rate=1e-2)
    strategy, val = hybrid(1, microbatches=1), DataLoader(pattern[:8], 8)
    fit(model, DataLoader(pattern, 8), strategy, val, precision=precision, callbacks=[seen])
    return seen.losses


def test_the_example_learns_as_in_float32():
    expected, found = (alone(learned, precision, 60) for precision in ("32-true", "16-true"))
    assert expected[-1] < 0.5 * expected[0]
    assert found[-1] == pytest.approx(expected[-1], rel=0.01)


class Seen(Callback):
    """The gradients that hooks see, whole, before the optimizer's step and after clipping."""

    def __init__(self):
        self.gradients = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        held = trainer.strategy.assembly.engine.named_parameters()
        full = {name: p.grad for name, p in held.items() if p.grad is not None}
        full = {name: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for name, g in full.items()}
        self.gradients.append(full)


def gradients(options, accumulate, data):
    seen = Seen()
    train, strategy = loader(BATCHES * BATCH, BATCH, data), hybrid(1, zero_stage=1)
    clipped = {"gradient_clip_val": 0.1, "accumulate_grad_batches": accumulate}
    options = {"plugins": [plugin()]} if options == "16-true" else {"precision": options}
    trainer = fit(Step(), train, strategy, callbacks=[seen], **clipped, **options)
    return seen.gradients, weights(trainer), trainer.strategy.assembly.clipping.last_norm


class Step(Half):
    """A plain step, which shows the gradients' size."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


def near(found, expected, bound=4 * 2.0**-11):
    """Sums of rounded products may cancel: errors are relative to the largest number of the model, not to each sum."""
    assert found.keys() == expected.keys()
    largest = max(value.abs().max() for value in expected.values())
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= bound * largest, name


@pytest.mark.parametrize("accumulate", [1, 3])
def test_hooks_and_clipping_meet_unscaled_gradients(accumulate):
    """Case 35: a window is unscaled once, however many batches it has."""
    expected, state, norm = run_trainers(2, gradients, "32-true", accumulate, 2)[0]
    found, state_found, norm_found = run_trainers(2, gradients, "16-true", accumulate, 2)[0]
    assert len(found) == len(expected)
    near(found[0], expected[0])
    near(state_found, state)
    assert float(norm_found) == pytest.approx(float(norm), rel=4 * 2.0**-11)


class Clipped(Half):
    """Clips by hand."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


def clipped(precision, layouts):
    """Norms (or largest elements) of the gradients behind clipping, of the whole model."""
    found = []
    for model, algorithm in ((Half, "norm"), (Half, "value"), (Clipped, "norm")):
        for layout in layouts:
            trainer = trainer_of(
                hybrid(**layout),
                plugins=[plugin()] if precision == "16-true" else [],
                precision=None if precision == "16-true" else precision,
                gradient_clip_val=0.05,
                gradient_clip_algorithm=algorithm,
            )
            trainer.fit(Measured.of(model), loader(BATCH, BATCH, dist.get_world_size() // layout["pipeline"]))
            found.append(trainer.lightning_module.size)
    return found


class Measured:
    @staticmethod
    def of(model):
        class Subclass(model):
            def optimizer_step(self, *args, **kwargs):
                super().optimizer_step(*args, **kwargs)
                held = self.trainer.strategy.assembly.engine.counted_parameters()
                grads = [local(p.grad).double().flatten() for p in held if p.grad is not None]
                sums = torch.stack([sum(g.square().sum() for g in grads)])
                most = torch.stack([max((g.abs().max() for g in grads if g.numel()), default=torch.zeros(()).double())])
                dist.all_reduce(sums)
                dist.all_reduce(most, op=dist.ReduceOp.MAX)
                self.size = float(sums.sqrt()), float(most)

        return Subclass()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-true"])
def test_clipping_is_by_the_whole_models_norm_in_every_precision(precision):
    """Case 34."""
    layouts = [{"pipeline": 1, "zero_stage": 3}, {"pipeline": 2}]
    for rank in run_trainers(2, clipped, precision, layouts):
        norms, values, by_hand = rank[:2], rank[2:4], rank[4:]
        for norm, _ in (*norms, *by_hand):
            assert norm == pytest.approx(0.05, rel=1e-4)
        for _, most in values:
            assert most == pytest.approx(0.05, rel=1e-6)


class Tokens(Half):
    """The loss is a mean over tokens, of which each sample has many."""

    unit, rate = 1.0, 1e-3

    def training_step(self, batch, batch_idx):
        lengths = batch[0].square().sum(1).mul(10).long() * self.unit
        errors = F.mse_loss(self(batch[0].float()), batch[1].float(), reduction="none").squeeze(1)
        return {"loss": (errors * lengths).sum() / lengths.sum(), "loss_weight": lengths.sum()}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.rate)


class Many(Tokens):
    unit = 2.0**24


class Few(Tokens):
    unit = 2.0**-24


def weighted(models, options):
    found = []
    for model in models:
        train = loader(BATCHES * BATCH, BATCH, 2)
        kind = {"plugins": [FP16MasterWeights(**options)]} if options else {}
        trainer = fit(model(), train, hybrid(1), accumulate_grad_batches=2, max_epochs=2, **kind)
        found.append((weights(trainer), trainer.precision_plugin.state.applied if options else 4))
    return found


def test_loss_weights_of_any_size_neither_overflow_nor_round():
    ((expected, _),) = run_trainers(2, weighted, [Tokens], {})[0]
    for found, applied in run_trainers(2, weighted, [Tokens, Few], {"init_scale": 8.0})[0]:
        near(found, expected, 0.01)
        assert applied == 4
    # nothing in the batch tells how large these are: the first window overflows, and the others know
    (found, applied), (many, of_many) = run_trainers(2, weighted, [Tokens, Many], {"init_scale": MODERATE})[0]
    assert applied == of_many == 3
    assert all(torch.equal(value, many[name]) for name, value in found.items())


class Bound:
    """Stands for an engine of one replica."""

    class mesh:
        data_group, device = None, torch.device("cpu")


def units():
    found = []
    for batch in (torch.zeros(5, 7, dtype=torch.long), (torch.zeros(6, 4), torch.zeros(6)), torch.ones(3, 2).bool()):
        scaling = plugin()
        scaling.bind(Bound)
        first = scaling.unit_of(batch)
        scaling.heed_weight(0.0)
        same = scaling.unit_of(batch)
        scaling.heed_weight(1000.0)
        found.append((first, same, scaling.unit_of(batch)))
        scaling.teardown()
    return found


def test_a_first_window_takes_its_unit_from_the_batch():
    assert alone(units) == [(64.0, 64.0, 1024.0), (8.0, 8.0, 1024.0), (4.0, 4.0, 1024.0)]


def loaded(folder):
    """Case 2: after each way to load other weights, a step with a rate of zero; are they what was loaded?"""
    source = Half()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(1.0 + 2.0**-12)  # not a float16
    state = source.state_dict()
    torch.save(state, folder / f"state{dist.get_rank()}.pt")
    trainer = trainer_of(hybrid(2), plugins=[plugin()], max_steps=0)
    trainer.fit(source, loader(BATCH, BATCH))
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    outcomes = {}
    for way in ("ckpt_path", "on_fit_start", "on_train_start"):
        module = Still()
        if way != "ckpt_path":
            setattr(module, way, partial(module.load_state_dict, state))
        path = folder / "weights.ckpt" if way == "ckpt_path" else None
        again = trainer_of(hybrid(1, microbatches=1, zero_stage=3), plugins=[plugin()])
        try:
            again.fit(module, loader(BATCH, BATCH, 2), ckpt_path=path)
        except (RuntimeError, KeyError) as error:
            outcomes[way] = str(error)
            continue
        found = weights(again)
        outcomes[way] = all(torch.equal(found[name], value) for name, value in state.items()) if found else True
    return outcomes


class Still(Half):
    rate = 0.0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


def test_masters_follow_weights_that_are_loaded(tmp_path):
    """Case 2; a checkpoint without optimizer states is refused by Lightning itself, for want of them."""
    for outcomes in run_trainers(2, loaded, tmp_path):
        assert outcomes["on_fit_start"] is outcomes["on_train_start"] is True
        assert outcomes["ckpt_path"] is True or "weights" in outcomes["ckpt_path"]


def averaged():
    with pytest.raises(ValueError, match="WeightAveraging averages all parameters in each process"):
        fit(Half(), loader(BATCH, BATCH), hybrid(1), plugins=[plugin()], callbacks=[WeightAveraging()])
    return True


def test_averages_in_each_process_are_refused():
    assert alone(averaged)


def resumed(folder):
    """Case 19: what the plugin adds loads under `weights_only=True`."""
    trainer = fit(Half(), loader(BATCH, BATCH), hybrid(1), plugins=[plugin()])
    trainer.save_checkpoint(folder / "a.ckpt")
    saved = torch.load(folder / "a.ckpt", weights_only=True)
    again = trainer_of(hybrid(1), plugins=[plugin(init_scale=8.0)], max_epochs=2)
    again.fit(Half(), loader(BATCH, BATCH), ckpt_path=folder / "a.ckpt", weights_only=True)
    return saved["FP16MasterWeights"], again.precision_plugin.state


def test_the_state_is_plain_numbers(tmp_path):
    saved, state = alone(resumed, tmp_path)
    expected = {"scale": MODERATE, "clean_steps": 1, "overflows": 0, "skipped": 0, "applied": 1, "weight_unit": 8.0}
    assert saved == expected
    assert (state.scale, state.applied) == (MODERATE, 2)


def test_a_scale_that_was_asked_for_stays_when_a_checkpoint_has_another():
    static, dynamic = FP16MasterWeights(64.0), FP16MasterWeights(init_scale=4.0)
    static.load_state_dict(dynamic.state_dict())
    assert static.loss_scale == 64.0
    dynamic.load_state_dict(static.state_dict())
    assert dynamic.loss_scale == 64.0


def flags():
    matmul, inside = torch.backends.cuda.matmul, []
    matmul.allow_fp16_reduced_precision_reduction = True

    class Looks(Callback):
        def on_train_start(self, trainer, pl_module):
            inside.append(matmul.allow_fp16_reduced_precision_reduction)

    fit(Half(), loader(BATCH, BATCH), hybrid(1), precision="16-true", callbacks=[Looks()])
    with torch.autocast("cpu", dtype=torch.float16):
        narrow = torch.ones(2, 2).half().softmax(-1).dtype
    return inside, matmul.allow_fp16_reduced_precision_reduction, narrow


def test_products_accumulate_in_float32_while_it_trains_and_settings_are_put_back():
    assert alone(flags) == ([False], True, torch.float16)


@pytest.mark.parametrize("seed", range(8))
def test_a_dot_product_is_right_to_one_unit_in_the_last_place(seed):
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.rand(2, 4096, generator=generator).half()
    exact = a.double() @ b.double()
    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        found = F.linear(a[None], b[None])
    assert found.dtype == torch.float16
    unit = torch.finfo(torch.float16).eps * 2.0 ** exact.log2().floor()
    assert (found.double() - exact).abs().item() <= unit


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"loss_scale": "static"}, "^loss_scale='static' must be 'dynamic' or a finite number above 0.$"),
        ({"loss_scale": 0.0}, "^loss_scale=0.0 must be 'dynamic' or"),
        ({"loss_scale": True}, "^loss_scale=True must be 'dynamic' or"),
        ({"loss_scale": float("inf")}, "^loss_scale=inf must be 'dynamic' or"),
        ({"init_scale": -1.0}, "^init_scale=-1.0 must be a finite number above 0.$"),
        ({"init_scale": 0.5}, "^init_scale=0.5 is not between min_scale=1.0 and"),
        ({"init_scale": 2.0**40}, "^init_scale=1099511627776.0 is not between"),
        ({"growth_factor": 0.5}, "^growth_factor=0.5 must be a finite number above 1.$"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(wrong, message):
    with pytest.raises(ValueError, match=message):
        FP16MasterWeights(**wrong)


class Small16(Small):
    """In float64: nothing is narrowed, and the numbers are those without the plugin."""


def doubles(precision):
    return weights(fit(Small16(), loader(8, 4), hybrid(2), precision=precision))


def test_float64_stays_float64():
    (found, _), (expected, _) = (run_trainers(2, doubles, precision) for precision in ("16-true", "64-true"))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


class Interrupted(Half):
    """Its third batch fails, or asks to stop within an accumulation window."""

    way = None

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.way == "fails":
            raise ArithmeticError
        self.trainer.should_stop = self.way == "stops" and batch_idx == 2
        return super().training_step(batch, batch_idx)


def begun_again(way, stages):
    """Losses of a second fit of the same module, and the types of its parameters."""
    found = []
    for stage in stages:
        module, seen = Interrupted(), Losses()
        module.way = way
        trainer = trainer_of(hybrid(1, zero_stage=stage), plugins=[plugin()], accumulate_grad_batches=2, min_epochs=0)
        with suppress(ArithmeticError):
            trainer.fit(module, loader(BATCHES * BATCH, BATCH, dist.get_world_size()))
        module.way = None
        trainer.callbacks.append(seen)
        trainer.fit_loop.max_epochs, trainer.should_stop = 3, False
        trainer.fit(module, loader(BATCHES * BATCH, BATCH, dist.get_world_size()))
        found.append((seen.losses, {p.dtype for p in module.parameters()}))
    return found


@pytest.mark.parametrize("way", ["fails", "stops"])
def test_a_fit_after_one_that_ended_within_a_window_trains_the_masters(way):
    (expected,) = alone(begun_again, way, [1])
    for losses, dtypes in run_trainers(2, begun_again, way, [1, 3])[0]:
        assert losses == pytest.approx(expected[0], rel=4 * 2.0**-11)
        assert dtypes == {torch.float32}


class Complex(Half):
    """A parameter of a third kind beside matrices, in a block as well; it overflows in the third batch."""

    class block(Half.block):
        def __init__(self):
            super().__init__()
            self.turn = nn.Parameter(torch.full((WIDTH,), 0.8 + 0.6j))

        def forward(self, x):
            return super().forward(x * (self.turn * self.turn.conj()).real)

    def on_after_backward(self):
        if self.trainer.fit_loop.batch_idx == 2:
            self.blocks[0].turn.grad[1] = complex(0.0, torch.inf)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


def with_complex(layouts):
    found = []
    for layout in layouts:
        data = dist.get_world_size() // layout["pipeline"]
        strategy, train = hybrid(**layout), loader(BATCHES * BATCH, BATCH, data)
        trainer = fit(Complex(), train, strategy, plugins=[plugin()], gradient_clip_val=0.5)
        found.append((weights(trainer), trainer.precision_plugin.state.applied))
    return found


def test_complex_parameters_are_unscaled_too():
    ((expected, _),) = alone(with_complex, [{"pipeline": 1, "microbatches": 1}])
    start = Complex().blocks[0].turn
    assert expected["blocks.0.turn"].dtype == torch.complex64
    assert not torch.equal(expected["blocks.0.turn"], start)
    for found, applied in run_trainers(2, with_complex, [{"pipeline": 1, "zero_stage": 2}])[0]:
        assert applied == BATCHES - 1
        torch.testing.assert_close(found, expected, rtol=4 * 2.0**-11, atol=4 * 2.0**-11)
