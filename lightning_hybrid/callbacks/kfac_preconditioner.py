"""Natural gradients by Kronecker-factored curvature, for any module, optimizer and layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hybrid.callbacks.applied_steps import AppliedSteps
from lightning_hybrid.callbacks.global_batch import count_samples, over_replicas
from lightning_hybrid.callbacks.kfac_checks import check_arguments, refuse_runs
from lightning_hybrid.callbacks.kfac_labels import DrawnLabels
from lightning_hybrid.callbacks.kfac_layers import Chosen, choose, show_layers, warn_of_uncalled, wide_type
from lightning_hybrid.callbacks.kfac_runs import (
    OwnPasses,
    held_by_name,
    replica_group,
    samples_of_loss,
    slopes_factor,
    weighs_losses,
)
from lightning_hybrid.callbacks.reports import fail_together
from lightning_hybrid.functional.stepwise import Stepwise, StepwiseWhole, checked_value
from lightning_hybrid.parallel.curvature.factors import RunningFactors
from lightning_hybrid.parallel.curvature.natural import NaturalGradients
from lightning_hybrid.parallel.curvature.states import gather_states, restore_states, restore_window
from lightning_hybrid.parallel.curvature.sums import WindowSums
from lightning_hybrid.parallel.gradient_parts import held_parts
from lightning_hybrid.parallel.ledgers.traffic import over_ranks

KEY = "kfac_preconditioner"  # entry of a checkpoint, with the factors of all ranks


class KFACPreconditioner(Callback):
    """Replaces gradients of linear, convolutional and embedding layers by natural ones, before they are clipped.

    The Fisher matrix of a layer is taken to be A (x) G, with A the mean of outer products of its inputs and G of its
    slopes: gradients of the loss of a sample with respect to its outputs, at all positions. Means are running ones,
    over all micro-batches of the global batch, and equal on all replicas. Any optimizer steps with what comes out;
    gradients of other parameters stay. Factors and inverses are of at least float32.

    Args:
        damping: What is added to the Fisher matrix, above 0, in its units: squared gradients of a sample's loss.
        factor_decay: Largest weight of the past in the running means, at least 0 and below 1.
        factor_every: Steps from one update of the means to the next.
        inverse_every: Steps from one inversion to the next.
        kl_clip: Steps are shortened where lr^2 times the product of gradient and natural gradient is above this, for
            plain SGD; None shortens nothing.
        method: "inverse" inverts A and G by themselves, with damping split between them; "eigen" inverts
            A (x) G + damping I by eigenvectors, for twice the products in each step.
        fisher: "empirical" takes slopes of the loss that is trained on; "mc" of one with labels that the model draws,
            in a pass of its own each time that the means are updated.
        modules: Layers that are taken, by patterns of names or types, as in `WeightDecayRules`; None takes all that can
            be and have no factor of more than 16,384 rows, and lists in a table why others are left alone.
        seed: Of the labels that "mc" draws.

    `damping`, `factor_every` and `inverse_every` may also be a mapping of values by the step from which they hold, or
    a function of the step; steps are those that the optimizer has applied.

    Attributes:
        clipping: What the last step was multiplied by, because of `kl_clip`.

    Raises:
        ValueError: If an argument is out of range; before training, if a wanted layer cannot be taken, or a run.

    Source: Martens and Grosse 2015, arXiv:1503.05671; Grosse and Martens 2016, arXiv:1602.01407, of convolutions.
    """

    def __init__(
        self,
        damping: Stepwise = 0.001,
        factor_decay: float = 0.95,
        factor_every: StepwiseWhole = 10,
        inverse_every: StepwiseWhole = 100,
        kl_clip: float | None = 0.001,
        method: Literal["inverse", "eigen"] = "inverse",
        fisher: Literal["empirical", "mc"] = "empirical",
        modules: str | type[nn.Module] | Sequence[str | type[nn.Module]] | None = None,
        seed: int = 0,
    ) -> None:
        check_arguments(damping, factor_decay, factor_every, inverse_every, kl_clip, method, fisher, modules, seed)
        self.damping, self.factor_decay, self.kl_clip = damping, factor_decay, kl_clip
        self.factor_every, self.inverse_every = factor_every, inverse_every
        self.method, self.fisher, self.seed = method, fisher, seed
        self.modules = [modules] if isinstance(modules, str | type) else modules
        self.clipping = 1.0
        self._applied = AppliedSteps()
        self._last: dict[str, int | None] = {"factors": None, "inverses": None}  # steps at which they were new
        self._samples, self._is_due = 0, False  # of this replica in the window; whether its means are taken in
        self._first, self._weight = 0.0, 1.0  # samples that its first loss is a mean over; of others as parts of them
        self._batch: tuple[Any, int] = (None, 0)
        self._chosen, self._labels = Chosen(), DrawnLabels(seed)
        self._own: OwnPasses | None = None
        self._sums: WindowSums | None = None
        self._factors: RunningFactors | None = None
        self._natural: NaturalGradients | None = None
        self._waiting: Mapping[str, Any] = {}  # of a checkpoint, until it is settled what this rank has

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._remove()
            self._applied.reset()
            self._last, self._waiting, self._is_due = {"factors": None, "inverses": None}, {}, False
            self._sums = self._factors = self._natural = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        refuse_runs(trainer, pl_module, takes_all=self.modules is None, draws=self.fisher == "mc")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._applied.start(trainer.optimizers, type(self).__name__)
        self._own = OwnPasses(trainer)
        settle = partial(self._settle, trainer, pl_module)
        ask = getattr(trainer.strategy, "when_settled", None)
        ask(settle) if ask is not None else settle()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._samples, self._is_due, self._first = 0, self._is_time("factors"), 0.0
            if self._sums is not None:
                self._begin(self._sums)
        if self._is_due:
            samples = count_samples(batch)
            self._samples += samples
            if self.fisher == "mc":
                self._batch = batch, batch_idx
            else:
                self._weigh(trainer, samples)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        assert self._own is not None
        self._own.begin()

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._own is not None
        self._own.end()
        if self._is_due and self.fisher == "mc":
            assert self._sums is not None
            (batch, batch_idx), self._batch = self._batch, (None, 0)
            self._labels.run(trainer, pl_module, batch, batch_idx, self._step, self._sums, self._own)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        assert self._factors is not None
        assert self._natural is not None
        ask = getattr(trainer.strategy, "gradient_parts", None)
        parts = ask(optimizer) if ask is not None else held_parts(pl_module.named_parameters(), optimizer)
        if self._is_due:
            is_first = self._last["factors"] is None
            self._take_in(trainer)
            if is_first and self._last["factors"] is not None:
                warn_of_uncalled(self._factors, parts)
        if self._last["factors"] is not None and self._is_time("inverses"):
            self._factors.invert(float(checked_value("damping", self.damping, self._step, whole=False)))
            self._last["inverses"] = self._step
        self.clipping = self._natural.install(parts, self._rates(trainer, optimizer), self.kl_clip)

    def leave_batch(self, trainer: Trainer) -> None:
        """Forget a window that an exception has ended, and after which `fit` goes on."""
        self._is_due, self._batch = False, (None, 0)
        if self._own is not None:
            self._own.end()
        if self._sums is not None:
            self._sums.end()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._remove()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._applied.state(), "last": dict(self._last), "clipping": self.clipping}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._applied.restore(state_dict["steps"])
        self._last, self.clipping = dict(state_dict["last"]), state_dict["clipping"]

    def own_state(self) -> dict[str, Any]:
        """What this rank needs to go back, between two windows; `put_back` takes it."""
        factors = {} if self._factors is None else {name: self._factors.state(name) for name in self._factors.of}
        return {**self.state_dict(), "factors": factors}

    def put_back(self, state: Mapping[str, Any]) -> None:
        """Go back to what `own_state` gave."""
        self.load_state_dict(dict(state))
        for name, own in state["factors"].items():
            assert self._factors is not None
            self._factors.restore(name, own)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._factors is not None and self._sums is not None:
            is_open = self._is_due and self._sums.is_open and hasattr(trainer.strategy, "held_parameters")
            window = self._sums.total(replica_group(trainer)) if is_open else {}
            (samples,) = over_replicas(trainer, self._samples) if is_open else (0,)
            states = gather_states(self._factors, self._chosen.counted, window)
            checkpoint[KEY] = {"layers": states, "samples": samples, "first": self._first, "is_open": is_open}

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._waiting = checkpoint.get(KEY, {})
        self._is_due, self._first = self._waiting.get("is_open", False), self._waiting.get("first", 0.0)

    @property
    def num_bytes(self) -> int:
        """What factors and inverses of this rank take; 0 before training."""
        return 0 if self._factors is None else sum(map(self._factors.num_bytes, self._factors.of))

    @property
    def _step(self) -> int:
        return self._applied.counts[0]

    def _is_time(self, what: Literal["factors", "inverses"]) -> bool:
        last, name = self._last[what], "factor_every" if what == "factors" else "inverse_every"
        every = checked_value(name, getattr(self, name), self._step, whole=True)
        return last is None or self._step - last >= every

    def _begin(self, sums: WindowSums) -> None:
        sums.end()  # of a window that was never applied
        if self._is_due:
            sums.begin(takes=self.fisher == "empirical")

    def _weigh(self, trainer: Trainer, samples: int) -> None:
        """Let the slopes of each sample count as those of the window's first batch do."""
        mean_over = samples_of_loss(trainer, samples)
        self._first = self._first or mean_over
        self._weight = 1.0 if weighs_losses(trainer) else mean_over / self._first
        if self._sums is not None:
            self._sums.weight = self._weight

    def _settle(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the layers of this rank; a pipeline calls it within the first batch."""
        chosen = self._chosen = choose(trainer, pl_module, self.modules)
        device, group = trainer.strategy.root_device, replica_group(trainer)
        dtype = wide_type(chosen.modules)
        self._sums = WindowSums(chosen.layers, chosen.modules, dtype, device)
        self._sums.is_own = self._own or self._sums.is_own
        self._factors = RunningFactors(chosen.layers, self.method, dtype, device, group)
        self._natural = NaturalGradients(chosen.layers, self._factors, chosen.counted, group, device)
        show_layers(trainer, chosen, self._factors, self.method)
        waiting, self._waiting = self._waiting, {}
        error = ""
        try:
            restore_states(self._factors, waiting.get("layers", {}))
        except ValueError as mismatch:
            error = str(mismatch)
        fail_together(error)
        self._begin(self._sums)
        self._sums.weight = self._weight
        if waiting.get("is_open") and (group is None or dist.get_rank(group) == 0):
            self._samples += waiting["samples"]
            restore_window(self._sums, waiting["layers"])

    def _take_in(self, trainer: Trainer) -> None:
        """Bring the window's means into the running ones."""
        assert self._sums is not None
        assert self._factors is not None
        self._is_due = False
        self._sums.reduce(replica_group(trainer))
        (samples,) = over_replicas(trainer, self._samples)
        # slopes of drawn labels are those of a sample's loss
        factor = 1 / samples if self.fisher == "mc" else slopes_factor(trainer, samples, self._first)
        if self._factors.take_in(self._sums.end(), factor, self.factor_decay):
            self._last["factors"] = self._step
            if any(over_ranks(self._factors.is_waiting)):  # a layer's first factors
                self._last["inverses"] = None

    def _rates(self, trainer: Trainer, optimizer: Optimizer) -> dict[str, float]:
        """Learning rates of the layers' weights."""
        rates = {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
        held = held_by_name(trainer)
        return {name: rates[id(held[f"{name}.weight"])] for name in self._chosen.layers}

    def _remove(self) -> None:
        self._applied.stop()
        if self._own is not None:
            self._own.remove()
        if self._sums is not None:
            self._sums.remove()
