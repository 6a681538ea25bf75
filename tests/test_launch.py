import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from tests.launch import run_ranks, run_trainers


def rank_and_sum(offset):
    total = offset + dist.get_rank()
    dist.all_reduce(total)
    return dist.get_rank(), total


def test_results_come_in_rank_order():
    results = run_ranks(3, rank_and_sum, torch.tensor([10.0]))
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(total.item() == 33 for _, total in results)


def test_a_launch_is_quick_once_the_server_runs():
    run_ranks(1, rank_and_sum, torch.zeros(1))
    start = time.monotonic()
    run_ranks(2, rank_and_sum, torch.zeros(1))
    assert time.monotonic() - start < 5  # some 0.2 s on a quiet machine, 8 s without the server


def two_threads_or_more_are_an_error():
    assert torch.get_num_threads() == 1
    return os.environ["FROM_PARENT"], os.getcwd()


def test_ranks_have_one_thread_and_the_callers_environment_and_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FROM_PARENT", "seen")
    monkeypatch.chdir(tmp_path)
    assert run_ranks(1, two_threads_or_more_are_an_error) == [("seen", str(tmp_path))]


def one_fails_while_the_others_wait():
    if dist.get_rank() == 1:
        raise ValueError("the message of rank one")
    dist.barrier()


def test_a_failing_rank_ends_all_and_shows_its_traceback():
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 of 3 failed.*one_fails_while.*the message of rank one"):
        run_ranks(3, one_fails_while_the_others_wait)
    assert time.monotonic() - start < 20


def one_dies_while_the_others_wait():
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def test_a_dead_rank_is_named_before_those_that_complain_about_it():
    with pytest.raises(RuntimeError, match=r"^rank 1 of 2 died without a word, exit code 7"):
        run_ranks(2, one_dies_while_the_others_wait)


def one_forgets_the_others():
    if dist.get_rank() != 2:
        dist.barrier()


def test_stuck_ranks_are_named_with_their_stacks():
    with pytest.raises(TimeoutError, match=r"(?s)rank 0 of 3 is stuck.*one_forgets_the_others.*rank 1") as error:
        run_ranks(3, one_forgets_the_others, timeout=3)
    assert "rank 2" not in str(error.value)


def warn():
    warnings.warn("a warning", UserWarning, stacklevel=1)


def test_a_warning_in_a_rank_is_an_error():
    with pytest.raises(RuntimeError, match="UserWarning: a warning"):
        run_ranks(1, warn)


@pytest.mark.filterwarnings("ignore:a warn")
def test_the_filters_of_a_test_reach_its_ranks():
    assert run_ranks(1, warn) == [None]


class Line(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def fit_line(devices, strategy):
    model = Line()
    data = DataLoader(TensorDataset(torch.arange(16.0).view(8, 2) / 16), batch_size=4 // devices)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    return trainer.global_rank, trainer.world_size, model.layer.weight.detach()


def test_a_trainer_in_every_rank_joins_the_group():
    results = run_trainers(2, fit_line, 2, "ddp")
    assert [(rank, size) for rank, size, _ in results] == [(0, 2), (1, 2)]
    assert torch.equal(results[0][2], results[1][2])
    assert not torch.equal(results[0][2], Line().layer.weight)


def sum_from_workers():
    return sum(
        batch.sum().item() for batch in DataLoader(TensorDataset(torch.ones(4)), num_workers=1, collate_fn=stack)
    )


def stack(rows):
    return torch.stack([row for (row,) in rows])


def test_a_rank_may_have_loader_workers():
    assert run_ranks(1, sum_from_workers) == [4.0]


def whatever_torch_saves(value):
    return value


def test_what_a_rank_gets_and_gives_is_copied():
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    (result,) = run_ranks(1, whatever_torch_saves, {"weight": parameter})
    assert torch.equal(result["weight"], parameter)
    assert result["weight"].requires_grad
    assert result["weight"] is not parameter


def what_cannot_be_sent():
    return lambda: None


def test_a_result_that_cannot_be_sent_is_an_error():
    with pytest.raises(RuntimeError, match=r"(?s)rank 0 of 1 failed.*[Pp]ickle"):
        run_ranks(1, what_cannot_be_sent)
