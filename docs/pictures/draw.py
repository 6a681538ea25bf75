"""Draws the pictures of the pages of callbacks and metrics: `python docs/pictures/draw.py NAME`, all without a name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

PICTURES = Path(__file__).parent


def plain(rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    """An empty picture of the usual size, and its axes."""
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    return figure, figure.subplots(rows, columns)


def save(figure: Figure, name: str) -> None:
    """Write a picture beside this file."""
    figure.savefig(PICTURES / f"{name}.png", dpi=120)


def run_rates(optimizer: Any, rates: Any, **options: Any) -> list[list[float]]:
    """Rate and step of an optimizer of one weight, whose gradient is always 1, in each of 24 steps."""
    from lightning_hybrid.callbacks.rate_factors import RateFactors

    weight = optimizer.param_groups[0]["params"][0]
    factors = RateFactors.of(optimizer)
    found = []
    for _ in range(24):
        factors.set("picture", rates, **options)
        before, weight.grad = weight.item(), weight.detach() * 0 + 1
        optimizer.step()
        found.append([factors.effective_rates[0], before - weight.item()])
    return found


def draw_learning_rate_scaling() -> None:
    """Factors by global batch, and what the correction of momentum does where a rate falls and rises."""
    import torch

    from lightning_hybrid.functional.rates import linear_scale, sqrt_scale
    from lightning_hybrid.optim import Lars

    figure, (left, right) = plain(columns=2)
    batches = [64 * 2**power for power in range(8)]
    for rule, name in ((linear_scale, "linear"), (sqrt_scale, "sqrt")):
        left.loglog(batches, [rule(batch / 256) for batch in batches], marker=".", label=name)
    left.set(xlabel="global batch", ylabel="factor of the rate")
    left.set_title("reference_batch_size=256", fontsize=9)
    left.legend(fontsize=8)

    def rate(step: int) -> float:
        return 1.0 if step < 8 else 0.25 if step < 16 else 2.0

    def weight() -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))]

    sgd, kinds = torch.optim.SGD(weight(), 1.0, momentum=0.9), {"adapt": False, "momentum": 0.9}
    for optimizer, correct, style, name in (
        (Lars(weight(), 1.0, **kinds), False, "tab:red", "rate in the buffer"),
        (Lars(weight(), 1.0, **kinds), True, "tab:blue", "the same, corrected"),
        (sgd, False, "k:", "rate outside (torch's SGD)"),
    ):
        steps = [step for _, step in run_rates(optimizer, rate, correct_momentum=correct)]
        right.plot(steps, style, drawstyle="steps-mid", label=name)
    right.set(xlabel="step", ylabel="length of the step")
    right.set_title("rate 1, then 1/4, then 2; gradient 1", fontsize=9)
    right.legend(fontsize=8, loc="upper left")
    save(figure, "learning_rate_scaling")


def draw_learning_rate_warmup() -> None:
    """Rates of steps under three schedules, which are dotted."""
    import torch
    from torch.optim import lr_scheduler

    from lightning_hybrid.callbacks.rate_factors import RateFactors
    from lightning_hybrid.functional.rates import warmup_progress, warmup_value

    length, schedules = (
        12,
        {
            "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 40),
            "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 8, 0.7),
            "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 20),
        },
    )
    figure, axes = plain(columns=3)
    for axis, (name, make) in zip(axes, schedules.items(), strict=True):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
        schedule, factors, own = make(optimizer), RateFactors.of(optimizer), []
        factors.set("picture", lambda step: warmup_value(0.1, 1.0, warmup_progress(step, length)))
        effective = []
        for _ in range(40):
            own.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            effective += factors.effective_rates
            schedule.step()
        axis.plot(own, ":", color="black")
        axis.plot(effective, color="tab:blue")
        axis.set_title(name, fontsize=7)
        axis.set(xlabel="step", ylim=(0, 1.05))
    axes[0].set_ylabel("learning rate")
    save(figure, "learning_rate_warmup")


def trained_digits(batch_size: int, rate: float) -> tuple[Any, Any]:
    """The network of `examples/digits.py` after 30 epochs of momentum SGD, and its loss on what it was trained on."""
    sys.path.append(str(PICTURES.parents[1]))  # for the examples
    import torch
    import torch.nn.functional as F

    from examples.digits import DigitsNet, Shuffled, parts

    torch.manual_seed(0)
    net, train = DigitsNet(batch_size=batch_size), parts()["train"]
    order = torch.tensor(list(Shuffled(len(train), 30, seed=0)))
    optimizer = torch.optim.SGD(net.parameters(), rate, momentum=0.9)
    for chosen in order.split(batch_size):
        optimizer.zero_grad()
        F.cross_entropy(net(train.images[chosen]), train.classes[chosen]).backward()
        optimizer.step()
    return net.eval(), lambda: F.cross_entropy(net(train.images), train.classes)


DIGITS = {"batches of 32": (32, 0.02), "batches of 1,280": (1280, 0.2)}


def draw_sharpness() -> None:
    """The loss of two minima on the way to the worst corner of the box, and away from it."""
    import torch

    from lightning_hybrid.functional.ascent import ascend, box_of, sharpness
    from lightning_hybrid.parallel.loss_surface import LossSurface, Term

    figure, axes = plain()
    along = torch.linspace(-1, 1, 41).tolist()
    for (label, settings), color in zip(DIGITS.items(), ("tab:blue", "tab:red"), strict=True):
        net, loss = trained_digits(*settings)
        surface = LossSurface(net, [Term(loss, (), 1.0)], None)
        with surface.open():
            found = ascend(surface.loss, surface.gradient, box_of(surface.parameters, 1e-3), steps=10)
            losses = [surface.loss([t * part for part in found.offset]) for t in along]
        value = sharpness(found.losses[0], found.losses[-1])
        axes.plot(along, losses, color=color, label=f"{label}: sharpness {value:.3g}")
    axes.set(xlabel="part of the way to the highest point that was found in the box", ylabel="loss in training")
    axes.legend()
    save(figure, "sharpness")


def draw_hessian_top_eigenvalue() -> None:
    """Rayleigh quotients of power iteration at two minima."""
    from functools import partial

    from lightning_hybrid.functional.power_iteration import largest_eigenvalue
    from lightning_hybrid.metrics import HessianTopEigenvalue
    from lightning_hybrid.parallel.loss_surface import LossSurface, Term

    figure, axes = plain()
    for (label, settings), color in zip(DIGITS.items(), ("tab:blue", "tab:red"), strict=True):
        net, loss = trained_digits(*settings)
        surface, quotients = LossSurface(net, [Term(loss, (), 1.0)], None), list[float]()

        def product(vector: list[Any], surface: Any = surface, quotients: list[float] = quotients) -> list[Any]:
            image = surface.product(vector)
            quotients.append(float(sum((a * b).sum() for a, b in zip(vector, image, strict=True))))
            return list(image)

        start = partial(HessianTopEigenvalue().start, surface.parameters)
        with surface.open():
            found = largest_eigenvalue(product, start, iterations=60, tolerance=1e-4)
        bound = f"$\\pm$ {found.residual:.1g}"
        axes.plot(
            range(1, len(quotients) + 1), quotients, ".-", color=color, label=f"{label}: {found.value:.4g} {bound}"
        )
    axes.set(xlabel="Hessian-vector products", ylabel="Rayleigh quotient", yscale="symlog")
    axes.legend()
    save(figure, "hessian_top_eigenvalue")


def growth_of_digits(growth: Any, schedule: Any) -> list[tuple[float, float, float, float]]:
    """Epoch, batch, rate and noise scale of each step of a small network that learns scikit-learn's digits."""
    import torch
    import torch.nn.functional as F
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    from examples.digits import parts
    from lightning_hybrid.callbacks.rate_factors import RateFactors
    from lightning_hybrid.functional.growth import noise_scale

    train, found = parts()["train"], list[tuple[float, float, float, float]]()

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return F.cross_entropy(self.layers(batch[0]), batch[1])

        def on_train_batch_end(self, *args: Any) -> None:
            factors, size = RateFactors.of(self.trainer.optimizers[0]), len(train)
            if factors.steps > len(found):
                accumulate, (rate,) = self.trainer.accumulate_grad_batches, factors.effective_rates
                first = self.trainer.fit_loop.total_batch_idx + 1 - accumulate
                scale = noise_scale(rate, 16 * accumulate, size, 0.9)
                found.append((first / self.trainer.num_training_batches, 16 * accumulate, rate, scale))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
            RateFactors.of(optimizer)
            return ([optimizer], [schedule(optimizer)]) if schedule else optimizer

    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(train.images, train.classes), 16, shuffle=True, drop_last=True)
    quiet: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    Trainer(accelerator="cpu", max_epochs=10, callbacks=growth, **quiet).fit(Net(), loader)
    return found


def draw_batch_size_growth() -> None:
    """Batch, rate and noise scale of two runs: a rate that decays, and a batch that grows up to a largest one."""
    from torch.optim.lr_scheduler import MultiStepLR

    from lightning_hybrid.callbacks import BatchSizeGrowth

    figure, panels = plain(rows=3)
    figure.set_size_inches(6, 6)
    decays = [2, 4, 6, 8]
    growth = BatchSizeGrowth.from_lr_schedule(decays, gamma=0.5, max_batch=128)
    runs = {
        "MultiStepLR, gamma 0.5": (growth_of_digits([], lambda optimizer: MultiStepLR(optimizer, decays, 0.5)), "k:"),
        "from_lr_schedule, max_batch=128": (growth_of_digits([growth], None), "tab:blue"),
    }
    for panel, number, name in zip(panels, (1, 2, 3), ("global batch", "learning rate", "noise scale"), strict=True):
        for label, (steps, style) in runs.items():
            values = [step[number] for step in steps]
            panel.plot([step[0] for step in steps], values, style, drawstyle="steps-post", label=label)
        panel.set(ylabel=name)
        panel.set_yscale("log", base=2)
        panel.yaxis.set_major_formatter("{x:g}")
    panels[0].set_title("digits, batches of 16 at first", fontsize=9)
    panels[0].legend(fontsize=8)
    panels[2].set(xlabel="epoch")
    save(figure, "batch_size_growth")


def draw_elastic() -> None:
    """Batch, replicas and accumulation by epoch of a run that nodes come to, and that loses one of them."""
    from lightning_hybrid.functional.growth import levels, nodes_to_add, share_out, usable_nodes

    figure, panels = plain(rows=3)
    figure.set_size_inches(6, 6)
    milestones, comes, lost, epochs = (3, 6, 9), {1: 1, 4: 1, 7: 1}, 12, range(16)
    sizes = [level.batch for level in levels(32, 32, [2, 2, 2])]
    nodes, waiting, rows = 1, 0, list[tuple[int, int, int, int]]()
    for epoch in epochs:
        waiting += comes.get(epoch, 0)
        level = sum(each <= epoch for each in milestones)
        batches = [size // 32 for size in sizes[level:]]
        if epoch == lost:
            present = nodes - 1
            nodes = usable_nodes(batches[0], nodes, nodes, present)
            waiting += present - nodes
        wanted = share_out(batches[0], nodes, 1, max_replicas=4).replicas
        added = nodes_to_add(batches, nodes, nodes, wanted, waiting)
        nodes, waiting = nodes + added, waiting - added
        rows.append((sizes[level], nodes, waiting, batches[0] // nodes))
    for panel, name, shown in zip(panels, ("global batch", "nodes", "accumulated"), ((0,), (1, 2), (3,)), strict=True):
        for number, style, label in zip(shown, ("tab:blue", "k:"), ("in the run", "waiting"), strict=False):
            panel.plot(epochs, [row[number] for row in rows], style, drawstyle="steps-post", label=label)
        panel.set(ylabel=name, ylim=(0, None))
    panels[0].set_title("batches grow at epochs 3, 6, 9; nodes come at 1, 4, 7; one of four is lost at 12", fontsize=9)
    panels[1].legend(fontsize=8)
    panels[2].set(xlabel="epoch")
    save(figure, "elastic")


def draw_gradient_noise() -> None:
    """Noise of one step after the other, and weights that leave a shallow minimum with it."""
    import torch

    from lightning_hybrid.functional.boxes import Box
    from lightning_hybrid.functional.noise import add_noise, noise_deviation

    eta, gamma, steps, runs = 1.0, 0.55, 300, 12

    def slope(weight: torch.Tensor) -> torch.Tensor:
        return 0.8 * weight * (weight * weight - 1) - 0.2  # of (w^2 - 1)^2 / 5 - 0.2 w

    figure, (left, right) = plain(columns=2)
    weights, alone = torch.full((runs,), -1.3), torch.full((1,), -1.3)
    paths, paths_alone, drawn = [weights.clone()], [alone.clone()], []
    for step in range(steps):
        noise = torch.zeros(runs)
        add_noise(noise, (runs,), Box.of((runs,)), noise_deviation(step, eta, gamma), (7, "weight", step))
        weights, alone = weights - 0.2 * (slope(weights) + noise), alone - 0.2 * slope(alone)
        drawn.append(noise)
        paths.append(weights)
        paths_alone.append(alone)
    bounds = [2 * noise_deviation(step, eta, gamma) for step in range(steps)]
    for index in range(runs):
        left.plot(torch.stack(drawn)[:, index], ".", color="tab:blue", markersize=1)
    for sign in (1, -1):
        left.plot([sign * bound for bound in bounds], color="tab:red")
    left.set(xlabel="step t", ylabel="added to the gradient")
    right.plot(torch.stack(paths), color="tab:blue", linewidth=0.5)
    right.plot(torch.stack(paths_alone), color="black")
    right.set(xlabel="step t", ylabel="weight")
    left.set_title("noise, and two deviations", fontsize=9)
    right.set_title("weights with noise, and without", fontsize=9)
    save(figure, "gradient_noise")


def losses_with_restarts(every: int, steps: int) -> list[float]:
    """A quadratic of ten weights under SGD whose momentum is cleared after every so many steps."""
    import torch

    from lightning_hybrid.optim.restarting import forget_all

    curvatures, weights = torch.logspace(-0.5, 0, 10), torch.nn.Parameter(torch.ones(10))
    optimizer = torch.optim.SGD([weights], 0.002, momentum=0.99)
    losses = []
    for step in range(steps):
        if step and step % every == 0:
            forget_all(optimizer, [{}])
        optimizer.zero_grad()
        loss = (curvatures * weights.square()).sum() / 2
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


def draw_optimizer_restart() -> None:
    """Momentum that is cleared, on a quadratic, and rates of cosine cycles that grow again after each restart."""
    import torch

    from lightning_hybrid.functional.rates import warmup_progress, warmup_value

    figure, (left, right) = plain(columns=2)
    left.semilogy(losses_with_restarts(400, 400), color="black", label="never")
    left.semilogy(losses_with_restarts(50, 400), color="tab:blue", label="every 50")
    left.set(xlabel="step", ylabel="loss of a quadratic")
    left.legend(fontsize=8)
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)
    cosine, rates, rising = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 20, 2), [], []
    for _ in range(140):
        rate, since = cosine.get_last_lr()[0], int(cosine.T_cur)
        restarted = cosine.last_epoch >= 20
        rates.append(rate)
        rising.append(rate * (warmup_value(0.0, 1.0, warmup_progress(since, 8)) if restarted else 1.0))
        optimizer.step()
        cosine.step()
    right.plot(rates, ":", color="black", label="schedule")
    right.plot(rising, color="tab:blue", label="rewarm=8")
    right.set(xlabel="step", ylabel="learning rate")
    right.legend(fontsize=8)
    save(figure, "optimizer_restart")


def losses_with_a_bad_batch(bad: int, factor: float, callbacks: list[Any]) -> dict[int, float]:
    """Losses by batch of a small network that learns digits, of which one batch is multiplied by a factor."""
    sys.path.append(str(PICTURES.parents[1]))  # for the examples
    import torch
    import torch.nn.functional as F
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    from examples.digits import parts

    train, losses = parts()["train"], dict[int, float]()
    torch.manual_seed(0)
    order = torch.randperm(len(train))
    images, classes = train.images[order].clone(), train.classes[order]
    images[32 * bad : 32 * (bad + 1)] *= factor

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
            )

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = F.cross_entropy(self.layers(batch[0]), batch[1])
            losses[batch_idx] = float(loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 0.01)

    quiet: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    loader = DataLoader(TensorDataset(images, classes), 32)
    Trainer(accelerator="cpu", max_epochs=1, callbacks=callbacks, **quiet).fit(Net(), loader)
    return losses


def draw_divergence_rollback() -> None:
    """Losses around a batch that is far too bright, and around one that is NaN, each with and without going back."""
    from tempfile import TemporaryDirectory

    from lightning_hybrid.callbacks import DivergenceRollback

    figure, panels = plain(columns=2)
    for axis, factor, detector, title in zip(
        panels, (1e3, float("nan")), ("spike", "nan"), ("images times 1,000", "images that are NaN"), strict=True
    ):
        bad = 24
        with TemporaryDirectory() as folder:
            callback = DivergenceRollback(detector, window=20, snapshot_every=10, audit=f"{folder}/audit.csv")
            healed = losses_with_a_bad_batch(bad, factor, [callback])
        assert callback.rollbacks == 1
        plainly = losses_with_a_bad_batch(bad, factor, [])
        del healed[bad]
        lost = [batch for batch, loss in plainly.items() if loss != loss]
        axis.plot(list(plainly), list(plainly.values()), color="tab:red", label="without")
        axis.plot(lost, [200.0] * len(lost), "x", color="tab:red", markersize=4)  # NaN has no height
        axis.plot(list(healed), list(healed.values()), color="tab:blue", label="DivergenceRollback")
        axis.axvspan(bad - 0.5, bad + 0.5, color="0.85", label="left out")
        axis.set(xlabel="batch", yscale="log", ylim=(0.2, 300))
        axis.set_title(title, fontsize=9)
    panels[0].set_ylabel("loss")
    panels[1].legend(fontsize=8, loc="center left")
    panels[1].annotate("NaN", (bad - 1, 200), ha="right", va="center", fontsize=8, color="tab:red")
    save(figure, "divergence_rollback")


def draw_kfac_preconditioner() -> None:
    """Losses of least squares and shares of digits told right by step, with SGD, AdamW and K-FAC, each at its best."""
    import torch

    from examples.natural_gradient import ENOUGH, Run, Way, train

    torch.set_num_threads(1)  # as the example, whose sums have the same last bits then
    figure, (left, right) = plain(columns=2)
    colors = {"SGD": "tab:red", "AdamW": "tab:green", "K-FAC": "tab:blue"}
    for way in (Way("SGD", 0.05, 0.99), Way("AdamW", 0.03, 0.0), Way("K-FAC", 0.1, 1e-4)):
        _, module = train(Run("least squares", way, 0))
        left.plot([loss / module.losses[0] for loss in module.losses], color=colors[way.arm], label=way.arm)
    left.set(xlabel="step", ylabel="loss / first", yscale="log")
    left.set_title("least squares", fontsize=9)
    for way in (Way("SGD", 0.4, 0.9), Way("AdamW", 0.025, 0.01), Way("K-FAC", 0.3, 1e-3)):
        watch, _ = train(Run("digits", way, 0))
        shares = [value * ENOUGH["digits"] for value in watch.values]
        right.plot(range(1, len(shares) + 1), shares, color=colors[way.arm], label=way.arm)
    right.axhline(ENOUGH["digits"], color="black", linewidth=0.8, linestyle="--")
    right.set(xlabel="step", ylabel="held-out digits told right", ylim=(0.5, 1.0))
    right.set_title("digits, batch of 1,024", fontsize=9)
    right.legend(fontsize=8, loc="lower right")
    save(figure, "kfac_preconditioner")


def draw_pipeline_bubble() -> None:
    """A step of 1F1B whose idle time is grey, and both conventions by the number of micro-batches."""
    from lightning_hybrid.functional.bubbles import bubble_ratio, bubble_share, pipeline_times
    from lightning_hybrid.functional.lowering import lower
    from lightning_hybrid.functional.schedules import Kind, choose
    from lightning_hybrid.functional.simulation import simulate

    def simulated(m: int, v: int = 1) -> list[Any]:
        name = "1f1b" if v == 1 else "interleaved_1f1b"
        return simulate(lower(choose(name, 4, m, v), 4 * v)).events

    figure, (above, below) = plain(rows=2)
    events = simulated(6)
    for rank, action, start, end in events:
        if action.kind in (Kind.FORWARD, Kind.BACKWARD):
            color = "tab:blue" if action.kind is Kind.FORWARD else "tab:orange"
            above.broken_barh([(start, end - start)], (rank - 0.4, 0.8), facecolors=color, edgecolor="white")
    above.set(facecolor="0.85", xlim=(0, max(e.end for e in events)), ylim=(3.5, -0.5), yticks=range(4))
    above.set_title("4 stages, 6 micro-batches: grey is idle", fontsize=9)
    above.set_ylabel("rank")
    counts = list(range(4, 41, 4))
    for v, style in ((1, "-"), (2, "--")):
        times = [pipeline_times(simulated(m, v)) for m in counts]
        for convention, color in ((bubble_ratio, "tab:red"), (bubble_share, "tab:green")):
            label = f"{convention.__name__.removeprefix('bubble_')}, {v} chunk{'s' * (v > 1)} a rank"
            below.plot(counts, [convention(*pair) for pair in times], style, color=color, marker=".", label=label)
    below.set(xlabel="micro-batches", ylabel="bubble", ylim=(0, 0.8))
    below.legend(fontsize=8)
    save(figure, "pipeline_bubble")


def wide_net() -> Any:
    """A LightningModule of six wide layers, and 24,576 samples."""
    import torch
    from lightning.pytorch import LightningModule
    from torch import nn

    torch.set_num_threads(1)

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
            self.example_input_array = torch.zeros(1, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self(batch[0]).square().mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self(batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-3)

    return Net(), torch.utils.data.TensorDataset(torch.randn(24_576, 256))


def draw_utilization() -> None:
    """Throughput that is logged in a run with validation, and what a clock on the wall says of the same steps."""
    import time

    from lightning.pytorch import Callback, Trainer
    from torch.utils.data import DataLoader

    from lightning_hybrid.callbacks import UtilizationMonitor

    class Wall(Callback):
        def __init__(self) -> None:
            self.rows, self.start = list[tuple[int, float, float, float]](), 0.0

        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step % 8 == 0:
                now, last = time.perf_counter(), monitor.last
                rates = (last["samples_per_second"], 8 * 256 / (now - self.start), last["model_flops_utilization"])
                self.rows.append((trainer.global_step, *rates))
                self.start = now

    monitor, wall = UtilizationMonitor("measured", peak_flops=1e11), Wall()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    often = {"max_epochs": 1, "log_every_n_steps": 8, "val_check_interval": 32, "limit_val_batches": 30}
    net, data = wide_net()
    loader = DataLoader(data, 256)
    Trainer(accelerator="cpu", callbacks=[monitor, wall], **often, **quiet).fit(net, loader, loader)
    figure, axes = plain()
    steps, ours, naive, use = zip(*wall.rows[1:], strict=True)
    axes.plot(steps, ours, marker=".", label="UtilizationMonitor: without validation")
    axes.plot(steps, naive, ":", marker=".", color="tab:red", label="by the clock on the wall")
    other = axes.secondary_yaxis("right", functions=(lambda y: y * use[0] / ours[0], lambda y: y * ours[0] / use[0]))
    other.set_ylabel("use of 100 GFLOP/s")
    axes.set(xlabel="step; validation after each 32", ylabel="samples a second", ylim=(0, 1.3 * max(ours)))
    axes.legend(fontsize=8)
    save(figure, "utilization")


def draw_batch_time_profile() -> None:
    """A profile of a small network on a CPU, as the callback draws it."""
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    from lightning_hybrid.callbacks import BatchTimeProfile

    net, data = wide_net()
    profile = BatchTimeProfile(repeats=31, max_size=512, picture=PICTURES / "batch_time_profile.png")
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    Trainer(accelerator="cpu", callbacks=[profile], max_steps=1, **quiet).fit(net, DataLoader(data, 256))


def noise_scale_of_all(layers: Any, images: Any, classes: Any) -> float:
    """tr(Sigma) over the squared norm of the mean gradient, from the gradient of each image."""
    import torch
    import torch.nn.functional as F
    from torch.func import functional_call, grad, vmap

    def loss(weights: Any, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(layers, weights, image[None]), label[None])

    weights = {name: parameter.detach() for name, parameter in layers.named_parameters()}
    each = vmap(grad(loss), (None, 0, 0))(weights, images, classes)
    gradients = torch.cat([gradient.flatten(1) for gradient in each.values()], 1)
    return float(gradients.var(0).sum() / gradients.mean(0).square().sum())


def noise_scales_of_digits(decay: float, every: int) -> tuple[list[float], dict[int, float]]:
    """The scale at each step of a small network that learns scikit-learn's digits, and that of all data at some."""
    import torch
    import torch.nn.functional as F
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader, default_convert

    from examples.digits import Shuffled, parts
    from lightning_hybrid.callbacks import GradientNoiseScaleMonitor
    from lightning_hybrid.metrics import GradientNoiseScale

    measured, exact, train = list[float](), dict[int, float](), parts()["train"]

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layers = torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10)
            self.layers = torch.nn.Sequential(*layers)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return F.cross_entropy(self.layers(batch[0]), batch[1])

        def on_before_zero_grad(self, optimizer: Any) -> None:
            measured.append(float(self.trainer.callback_metrics.get("gradient_noise_scale", "nan")))
            if len(measured) % every == 0:
                exact[len(measured)] = noise_scale_of_all(self.layers, train.images, train.classes)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    torch.manual_seed(0)
    loader = DataLoader(train, 32, sampler=Shuffled(len(train), 60, seed=0), collate_fn=default_convert)
    quiet: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    callbacks = [GradientNoiseScaleMonitor(GradientNoiseScale(decay))]
    trainer = Trainer(accelerator="cpu", max_epochs=1, accumulate_grad_batches=4, callbacks=callbacks, **quiet)
    trainer.fit(Net(), loader)
    return measured, exact


def draw_gradient_noise_scale() -> None:
    """The scale of a training as measured on the way and over all data, and what batch sizes cost at its end."""
    from lightning_hybrid.functional.noise_scale import batch_costs

    figure, (left, right) = plain(columns=2)
    for decay, color in ((0.9, "lightblue"), (0.99, "tab:blue")):
        measured, exact = noise_scales_of_digits(decay, every=50)
        left.plot(measured, color=color, linewidth=1, label=f"measured, decay {decay}")
    left.plot(list(exact), list(exact.values()), "o", color="black", markersize=4, label="over all data")
    left.set(xlabel="step", ylabel="noise scale (samples)", yscale="log")
    left.legend(fontsize=8)
    batches, scale = [2.0 ** (index / 4) for index in range(8, 57)], measured[-1]
    costs = [batch_costs(batch, scale) for batch in batches]
    right.plot(batches, [cost.steps for cost in costs], color="tab:red", label="steps / least")
    right.plot(batches, [cost.samples for cost in costs], color="tab:green", label="samples / least")
    right.axvline(scale, color="black", linewidth=0.8, linestyle="--")
    right.set(xlabel="batch size", xscale="log", yscale="log")
    right.legend(fontsize=8)
    left.set_title("digits, batches of 4 x 32", fontsize=9)
    right.set_title("what batch sizes cost at the end", fontsize=9)
    save(figure, "gradient_noise_scale")


if __name__ == "__main__":
    drawn = [name for name in list(globals()) if name.startswith("draw_")]
    for name in [f"draw_{word}" for word in sys.argv[1:]] or drawn:
        globals()[name]()
