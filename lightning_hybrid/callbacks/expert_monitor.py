"""How evenly the experts of each layer are used: logged while training, and drawn at its end."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_hybrid.callbacks.pictures import Picture, picture_path, write_picture
from lightning_hybrid.functional.load_drawing import loads_png
from lightning_hybrid.functional.loads import Layers, LoadHistory, Routed
from lightning_hybrid.parallel.experts.monitored import RoutingCounter, counters_of, read, summed_over_ranks
from lightning_hybrid.parallel.ledgers.traffic import over_ranks

FILE = "experts.png"


class ExpertMonitor(Callback):
    """Logs the load of each expert, the share of dropped pairs and the entropy of the routers, with any strategy.

    Of each layer NAME, every `every_n_steps` optimizer steps, over all tokens of all replicas since the last time:

    - `experts/NAME/load/0` and so on: that expert's share of the pairs of a token and an expert, before dropping.
    - `experts/NAME/imbalance`: the largest load over that of even routing, 1 to E.
    - `experts/NAME/dropped`: share of the pairs that were above the capacity; with one expert a token, of the tokens.
    - `experts/NAME/entropy`: mean entropy of a token's probabilities in nats, at most ln E.

    They are shares of sums over the replicas, equal on every rank. Only training passes count, each once; layers
    that routed nothing are left out. At the end of `fit` rank 0 draws the loads as heat maps: layers by experts, and
    each layer's experts over the steps. After an exception, ranks that it reaches draw what was read before.

    Args:
        every_n_steps: None for the Trainer's `log_every_n_steps`. A logger is given values at multiples of that only;
            `trainer.callback_metrics` has the last ones.
        picture: A path, which ends in ".png" or is a folder; True for `experts.png` in the logger's folder, or without
            a logger in `default_root_dir`; False for none. The next `fit` into the same folder replaces it.
        each_expert: Log `load` too, E values a layer.

    Attributes:
        last: By layer, what was routed in the steps of the last reading, see `functional.loads.Routed`. Where there
            is a tensor axis, sums count its ranks too.
        history: Of the whole fit.

    Raises:
        ValueError: If `every_n_steps` is below 1; before training, if the model has no layer that counts.
    """

    def __init__(self, every_n_steps: int | None = None, picture: Picture = True, each_expert: bool = True) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps} is no number of steps: give 1 or more, or None.")
        picture_path(picture, FILE)
        self.every_n_steps, self.picture, self.each_expert = every_n_steps, picture, each_expert
        self.last: Layers = {}
        self.history = LoadHistory()
        self._counters: dict[str, tuple[RoutingCounter, RoutingCounter]] = {}
        self._path, self._step = "", 0

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not any(over_ranks(bool(counters_of(pl_module)))):
            raise ValueError(
                f"ExpertMonitor has nothing to watch: no module of {type(pl_module).__name__} has `statistics` as a "
                "lightning_hybrid.experts.MoELayer has them. Remove the callback, or build the model with such layers."
            )
        self._path = picture_path(self.picture, FILE, trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave()
        self._counters = {name: (counter, counter.follow()) for name, counter in counters_of(pl_module).items()}
        self.last, self.history, self._step = {}, LoadHistory(), trainer.global_step

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step < self._step:  # the run has gone back, and the layers' counts with it
            self._step = trainer.global_step
            self.history.forget(self._step)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        interval: int = self.every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not interval or trainer.global_step // interval == self._step // interval:
            return
        self._read(trainer)
        for name, routed in self.last.items():
            if routed.num_pairs:
                self._log(pl_module, name, routed)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step > self._step:
            self._read(trainer)
        self._finish(draws=trainer.is_global_zero)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._finish(draws=True)  # what was read, which all ranks have: nobody knows which of them get here

    def _read(self, trainer: Trainer) -> None:
        self._step = trainer.global_step
        self.last = summed_over_ranks(read({name: follower for name, (_, follower) in self._counters.items()}))
        self.history.add(self._step, self.last)

    def _log(self, pl_module: LightningModule, name: str, routed: Routed) -> None:
        values = {"imbalance": routed.imbalance, "dropped": routed.dropped_share, "entropy": routed.mean_entropy}
        if self.each_expert:
            values |= {f"load/{number}": load for number, load in enumerate(routed.load)}
        for key, value in values.items():
            pl_module.log(f"experts/{name}/{key}", torch.tensor(value, dtype=torch.float64), batch_size=1)

    def _finish(self, *, draws: bool) -> None:
        self._leave()
        if not (draws and self._path and any(map(_has_pairs, self.history.windows))):
            return
        write_picture(self._path, lambda file: loads_png(self.history, file), type(self).__name__)
        self._path = ""

    def _leave(self) -> None:
        for counter, follower in self._counters.values():
            counter.leave(follower)
        self._counters = {}


def _has_pairs(window: tuple[int, Layers]) -> bool:
    return any(routed.num_pairs for routed in window[1].values())
