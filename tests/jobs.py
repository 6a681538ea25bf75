"""Jobs that end badly: each rank runs to its own end, without a launcher that would end the others."""

import os
import signal
import sys
import time
from multiprocessing import connection
from pathlib import Path

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, DistributedSampler

from lightning_hybrid.parallel.failures import watch
from tests.launch import _context, free_port
from tests.small import Small, hybrid, samples

MESSAGE = "the message of the rank that failed"
LIMIT = 40  # seconds in which a job has to end on a busy machine; alone it takes about 2


class Ended:
    """How the ranks ended.

    Attributes:
        codes: Exit codes; None for ranks that had to be killed.
        logs: What each wrote to stdout and stderr.
    """

    def __init__(self, folder, processes):
        deadline = time.monotonic() + LIMIT
        pending = list(processes)
        while pending and time.monotonic() < deadline:
            connection.wait([process.sentinel for process in pending], deadline - time.monotonic())
            pending = [process for process in pending if process.is_alive()]
        stuck = [process.pid for process in pending]
        for process in pending:
            process.kill()
        for process in processes:
            process.join()
        self.codes = [None if process.pid in stuck else process.exitcode for process in processes]
        self.logs = [Path(folder, f"log-{rank}").read_text() for rank in range(len(processes))]
        for process in processes:
            process.close()

    def __str__(self):
        return "\n".join(
            f"== rank {r}: {c}\n{log}" for r, (c, log) in enumerate(zip(self.codes, self.logs, strict=True))
        )


def run_job(size, function, folder, *args):
    """Call `function(folder, *args)` in `size` processes that only the environment of torchrun holds together."""
    port = free_port()
    processes = [
        _context().Process(target=_main, args=(rank, size, port, os.getpid(), str(folder), function, args))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    return Ended(folder, processes)


def _main(rank, size, port, parent, folder, function, args):
    log = os.open(Path(folder, f"log-{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        TORCHELASTIC_RUN_ID="tests",
    )
    os.chdir(folder)
    function(Path(folder), *args)
    sys.stdout.flush()


class Fault(Callback):
    """Ends or stops a rank at a moment.

    Args:
        rank: Which one.
        moment: "early" (before the process group), "start", "forward", "backward", "save", "write" (of rank 0's file)
            or "epoch end".
        way: "kill", "raise", or "hang": the others hang, as ranks do whose backend does not notice that a peer is gone.
    """

    def __init__(self, rank, moment, way):
        self.rank, self.moment, self.way = rank, moment, way

    def at(self, moment, trainer):
        if moment != self.moment:
            return
        if trainer.global_rank == self.rank:
            self.strike()
        elif self.way.endswith("hang"):
            time.sleep(600)

    def strike(self):
        if "kill" in self.way:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError(MESSAGE)

    def setup(self, trainer, pl_module, stage):
        self.at("start", trainer)

    def on_train_epoch_end(self, trainer, pl_module):
        self.at("epoch end", trainer)

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.at("save", trainer)
        if self.moment == "write" and trainer.global_rank == 0:
            checkpoint["weights that come first"] = torch.zeros(100_000)
            checkpoint["bomb"] = Bomb(self.strike)


class Bomb:
    def __init__(self, strike):
        self.strike = strike

    def __reduce__(self):
        self.strike()


class Struck(Small):
    """Its steps pass the moments "forward" and "backward" of the second batch."""

    def __init__(self, fault):
        super().__init__()
        self.fault = [fault]  # in a list, so that it is no part of the model's state

    def forward(self, x):
        if self.trainer.training and self.trainer.global_step == 1:
            self.fault[0].at("forward", self.trainer)
        return super().forward(x)

    def backward_hook(self, module, grads):
        if self.trainer.training and self.trainer.global_step == 1:
            self.fault[0].at("backward", self.trainer)

    def configure_callbacks(self):
        self.fault[0].at("early", self.trainer)
        return []

    def setup(self, stage):
        for block in self.blocks:
            block.register_full_backward_pre_hook(self.backward_hook)


def strike(folder, rank, moment, way, pipeline=2, tensor=1):
    watch.GRACE = 1.0
    fault = Fault(rank, moment, way)
    checkpoint = ModelCheckpoint(folder, "{epoch}-{step}", every_n_train_steps=2, save_top_k=-1)
    train(Struck(fault), pipeline, tensor, callbacks=[fault, checkpoint], max_epochs=2)


def train(module, pipeline=2, tensor=1, saving=None, **options):
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    devices = int(os.environ.get("WORLD_SIZE", 2))
    plan = {"linear": "rowwise"}
    strategy = hybrid(pipeline, tensor_parallel_size=tensor, tensor_parallel_plan=plan, **saving or {})
    trainer = Trainer(accelerator="cpu", devices=devices, strategy=strategy, **quiet, **options)
    data = devices // (pipeline * tensor)
    validation = share(8, data) if is_overridden("validation_step", module) else None
    trainer.fit(module, share(16, data), validation)


def share(number, data):
    """This replica's share of batches of four samples, in order; there is no group yet that could tell the rank."""
    dataset, rank = samples(number), int(os.environ.get("RANK", 0))
    sampler = DistributedSampler(dataset, data, rank % data, shuffle=False) if data > 1 else None
    return DataLoader(dataset, 4 // data, sampler=sampler)


def check_clean_end(ended, folder, rank, way, cause=MESSAGE):
    """Every rank has ended by itself and badly, the cause is in sight everywhere, and each checkpoint is whole."""
    assert None not in ended.codes, str(ended)
    assert 0 not in ended.codes, str(ended)
    if "raise" in way:
        assert f"ArithmeticError: {cause}" in ended.logs[rank], str(ended)
        assert "RuntimeError: Rank" not in ended.logs[rank], str(ended)
    for other, log in enumerate(ended.logs):
        first = f"ank {rank} failed first: " + ("its process (" if "kill" in way else f"ArithmeticError: {cause}")
        assert other == rank or first in log, str(ended)
    for file in folder.glob("**/*.ckpt"):
        assert "state_dict" in torch.load(file, weights_only=False)


class Stopped(Small):
    """Sends SIGTERM to itself on the given ranks, in the middle of the third batch's step or of its validation."""

    def __init__(self, ranks, hook):
        super().__init__()
        self.ranks, self.hook = list(ranks), hook

    def stop(self, hook):
        if hook == self.hook and self.trainer.global_rank in self.ranks and not self.trainer.sanity_checking:
            os.kill(os.getpid(), signal.SIGTERM)

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            self.stop("training")
        return super().training_step(batch, batch_idx)

    def on_train_end(self):
        self.stop("end")

    def validation_step(self, batch, batch_idx):
        self.stop("validation")
        self.log("val", self.loss(batch))


class Note(Callback):
    """Writes down how this rank leaves."""

    def on_exception(self, trainer, pl_module, exception):
        print(f"left by {type(exception).__name__} at step {trainer.global_step}", flush=True)


class Fails(Callback):
    """Raises on the given ranks after the third batch."""

    def __init__(self, ranks, error):
        self.ranks, self.error = ranks, error

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 2 and trainer.global_rank in self.ranks:
            raise self.error(MESSAGE)


class FailsInside(Stopped):
    def stop(self, hook):
        if hook == "training" and self.trainer.global_rank in self.ranks:
            raise ArithmeticError(MESSAGE)


def fail(folder, ranks, callbacks, inside=False, error=ArithmeticError, saving=None):
    module = FailsInside(ranks, "") if inside else Small()
    train(module, callbacks=[*([] if inside else [Fails(ranks, error)]), *callbacks], max_epochs=1, saving=saving)


def stop(folder, ranks, hook, callbacks, pipeline=2, saving=None):
    before = signal.getsignal(signal.SIGTERM)
    try:
        callbacks = [Note(), *callbacks]
        train(Stopped(ranks, hook), pipeline, callbacks=callbacks, max_epochs=2, val_check_interval=2, saving=saving)
    finally:
        assert signal.getsignal(signal.SIGTERM) is before
