import os
import sys

import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.connectors import accelerator_connector

from lightning_hybrid.strategies.launching import PARENT, REFUSED, Launcher, launching_parent
from tests.launch import run_ranks
from tests.small import Small, hybrid, loader, trainer_of

TORCHRUN = {"TORCHELASTIC_RUN_ID": "tests", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
SLURM = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_NAME": "train"}
SIZES = [
    (TORCHRUN | {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, 2, 1, "torchrun started 4 processes .* Set devices=4,"),
    (TORCHRUN | {"WORLD_SIZE": "2"}, 4, 1, r"devices=4, num_nodes=1\) asks for 4. Set devices=2, or start 4."),
    (TORCHRUN | {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, 4, 1, "2 processes on this node and devices=4. Set dev"),
    (TORCHRUN | {"WORLD_SIZE": "3"}, 2, 2, r"started 3 processes and .*num_nodes=2\) asks for 4. Set num_nodes=1, or"),
    (SLURM | {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "4"}, 2, 1, "SLURM started 4 processes .* Set devices=4,"),
    ({"LOCAL_RANK": "2", "NODE_RANK": "0"}, 2, 1, "LOCAL_RANK=2 and devices=2: local ranks count from 0 to 1"),
    ({}, 3, 1, "world_size=3 is not a multiple of pipeline_parallel_size=2 .* Start 2 processes"),
]


def fit(devices, nodes=1):
    trainer = Trainer(accelerator="cpu", devices=devices, num_nodes=nodes, strategy=hybrid(2), logger=False)
    trainer.fit(Small(), loader(8, 4))


@pytest.mark.parametrize(("environment", "devices", "nodes", "message"), SIZES)
def test_processes_that_are_not_those_of_the_trainer_are_refused_before_any_group(
    environment, devices, nodes, message, monkeypatch
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message) as caught:
        fit(devices, nodes)
    assert "\n" not in str(caught.value)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("plan", "message"),
    [({"nothing": "colwise"}, "'nothing', which matches no module"), ({"linear": "colwise"}, "4.*6|6.*4")],
)
def test_plans_that_cannot_be_are_refused_before_any_process_is_started(plan, message):
    strategy = hybrid(1, 1, 1, tensor_parallel_size=4, tensor_parallel_plan=plan)
    trainer = Trainer(accelerator="cpu", devices=4, strategy=strategy, logger=False)
    with pytest.raises(ValueError, match=message) as caught:
        trainer.fit(Small(), loader(8, 4))
    assert "\n" not in str(caught.value)
    assert not dist.is_initialized()


def other_size():
    os.environ.update(TORCHRUN, WORLD_SIZE="4")
    with pytest.raises(ValueError, match=r"Whoever made the process group started 2 processes and .* asks for 4"):
        fit(4)


def test_group_that_has_another_size_is_refused():
    run_ranks(2, other_size)


@pytest.mark.parametrize("kind", REFUSED)
def test_processes_that_hand_back_one_stage_are_refused(kind):
    with pytest.raises(ValueError, match=f"strategy='hybrid_ptdp_{kind}': .* Run a script with strategy='hybrid_ptdp'"):
        Trainer(accelerator="cpu", devices=2, strategy=f"hybrid_ptdp_{kind}")
    assert f"hybrid_ptdp_{kind}" in StrategyRegistry.available_strategies()


def test_notebook_takes_one_process_and_refuses_more(monkeypatch):
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    trainer_of(hybrid(1))
    with pytest.raises(MisconfigurationException, match="not compatible with an interactive environment"):
        Trainer(accelerator="cpu", devices=2, strategy=hybrid(2))


@pytest.mark.parametrize(
    ("value", "local_rank", "parent"),
    [
        ("", "1", False),  # started by others
        ("parent", "0", False),  # rank 0 itself, or what it starts
        ("parent", "1", True),
        ("nobody", "1", True),  # rank 0 ended before this process looked
        ("other", "1", False),  # started by a rank, not by rank 0's launcher
    ],
)
def test_only_processes_of_the_launcher_depend_on_rank_0(value, local_rank, parent, monkeypatch):
    pids = {"parent": os.getppid(), "nobody": 2**22 + 1, "other": os.getpid()}
    monkeypatch.setenv(PARENT, str(pids.get(value, "")))
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert launching_parent() == (pids[value] if parent else None)


@pytest.fixture
def launcher(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", PARENT):
        monkeypatch.setenv(name, "1")  # so that the launcher's variables are taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    seen = []
    return Launcher(LightningEnvironment(), 1, 1, enter=seen.append, on_error=lambda trainer, error: seen[1]), seen


def test_function_runs_without_the_variable_that_is_for_the_ranks(launcher):
    assert launcher[0].launch(lambda value: (value, os.environ.get(PARENT)), 3) == (3, None)


def test_what_is_raised_is_what_the_strategy_says(launcher):
    instead = RuntimeError("rank 2 failed first")
    launcher[1][:] = ["unused", instead]
    with pytest.raises(RuntimeError, match="rank 2 failed first") as caught:
        launcher[0].launch(sys.exit, 3)
    assert isinstance(caught.value.__cause__, SystemExit)
