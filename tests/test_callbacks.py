"""Which of Lightning's own callbacks work: the table in the documentation is what was seen here.

``python -m tests.test_callbacks`` writes the table anew.
"""

import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim.swa_utils import get_ema_avg_fn

from tests.launch import run_trainers
from tests.small import Small, fit, hybrid, loader, weights

pytestmark = [  # Lightning's advice for OnExceptionCheckpoint
    pytest.mark.filterwarnings("ignore:.*was called without a model:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is set, but there is no last checkpoint available:UserWarning"),
]
PAGE = Path(__file__).parents[1] / "docs" / "callbacks.md"
ABSTRACT = {"BaseFinetuning", "BasePredictionWriter", "Callback", "Checkpoint", "ProgressBar"}


class Spiking(callbacks.SpikeDetection):
    """Compares every loss."""


class Writer(callbacks.BasePredictionWriter):
    """Writes nothing."""


class Freezing(callbacks.BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.inlet)

    def finetune_function(self, pl_module, epoch, optimizer):
        """Nothing is unfrozen."""


MADE = {  # how a user would make each, given a folder
    "BackboneFinetuning": lambda folder: callbacks.BackboneFinetuning(1),
    "BaseFinetuning": lambda folder: Freezing(),
    "BasePredictionWriter": lambda folder: Writer("epoch"),
    "BatchSizeFinder": lambda folder: callbacks.BatchSizeFinder(),
    "DeviceStatsMonitor": lambda folder: callbacks.DeviceStatsMonitor(cpu_stats=False),
    "EMAWeightAveraging": lambda folder: callbacks.EMAWeightAveraging(),
    "EarlyStopping": lambda folder: callbacks.EarlyStopping("val_loss", patience=1),
    "GradientAccumulationScheduler": lambda folder: callbacks.GradientAccumulationScheduler({0: 1, 1: 2}),
    "LambdaCallback": lambda folder: callbacks.LambdaCallback(on_train_start=lambda trainer, module: None),
    "LearningRateFinder": lambda folder: callbacks.LearningRateFinder(),
    "LearningRateMonitor": lambda folder: callbacks.LearningRateMonitor("step"),
    "ModelCheckpoint": lambda folder: callbacks.ModelCheckpoint(folder, monitor="val_loss"),
    "ModelPruning": lambda folder: callbacks.ModelPruning("l1_unstructured", amount=0.5),
    "ModelSummary": lambda folder: callbacks.ModelSummary(),
    "OnExceptionCheckpoint": lambda folder: callbacks.OnExceptionCheckpoint(folder),
    "RichModelSummary": lambda folder: callbacks.RichModelSummary(),
    "RichProgressBar": lambda folder: callbacks.RichProgressBar(),
    "SpikeDetection": lambda folder: Spiking(atol=1e9, exclude_batches_path=folder / "skip.json"),
    "StochasticWeightAveraging": lambda folder: callbacks.StochasticWeightAveraging(0.01),
    "TQDMProgressBar": lambda folder: callbacks.TQDMProgressBar(),
    "ThroughputMonitor": lambda folder: callbacks.ThroughputMonitor(lambda batch: len(batch[0]), window_size=2),
    "Timer": lambda folder: callbacks.Timer(timedelta(hours=1)),
    "WeightAveraging": lambda folder: callbacks.WeightAveraging(avg_fn=get_ema_avg_fn(0.9)),
}
REMARKS = {
    "BasePredictionWriter": "writes on rank 0, which is given every sample once, in order",
    "DeviceStatsMonitor": "each rank's own device, of which the logger shows rank 0's",
    "OnExceptionCheckpoint": "skipped, with a warning, unless all ranks leave at the same step",
    "ModelCheckpoint": "one file or folder of the whole model; all ranks decide alike",
    "ModelSummary": "of the whole model, before it is cut",
    "RichModelSummary": "of the whole model, before it is cut",
    "ThroughputMonitor": "counts a sample once for each rank of a pipeline or tensor axis; "
    "[`UtilizationMonitor`](metrics/utilization.md) once",
}


class Validated(Small):
    flops_per_batch = 1000

    @property
    def backbone(self):
        return self.inlet

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


def outcome(name, folder, strategy="auto", data=1):
    """The weights of a fit with a callback, or the first sentence of what refuses it."""
    options = {"callbacks": [MADE[name](folder)], "logger": CSVLogger(folder), "log_every_n_steps": 2, "max_epochs": 3}
    options["enable_checkpointing"] = "Checkpoint" in name
    options |= {"enable_progress_bar": True} if "ProgressBar" in name else {}
    options |= {"enable_model_summary": True} if "Summary" in name else {}
    try:
        return dict(weights(fit(Validated(), loader(16, 4, data), strategy, loader(4, 4 // data, seed=1), **options)))
    except (ValueError, MisconfigurationException) as error:
        return str(error).partition(". ")[0]


def outcomes(folder):
    return {name: outcome(name, folder / name, hybrid()) for name in MADE}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("callbacks")
    for name in MADE:
        (folder / name).mkdir()
    return run_trainers(2, outcomes, folder, timeout=240)


def table(found):
    """Rows of the table: each callback, whether it works, and what there is to say."""
    rows = ["| callback | works | remark |", "|---|---|---|"]
    for name, result in found.items():
        refused = isinstance(result, str)
        rows.append(f"| `{name}` | {'no' if refused else 'yes'} | {result if refused else REMARKS.get(name, '')} |")
    return "\n".join(rows) + "\n"


def test_every_stock_callback_is_tried():
    assert {*MADE, *ABSTRACT} == set(callbacks.__all__)


def test_one_that_works_leaves_the_weights_of_one_process(found, tmp_path):
    for name, result in found[0].items():
        if not isinstance(result, str):
            (tmp_path / name).mkdir()
            torch.testing.assert_close(result, outcome(name, tmp_path / name))
        assert all(isinstance(other[name], str) == isinstance(result, str) for other in found)


def test_the_documentation_says_what_was_seen(found):
    written = re.search(r"^\| callback .*?(?=\n\n|\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert written is not None
    assert written[0].strip() == table(found[0]).strip()


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        for each in MADE:
            (Path(name) / each).mkdir()
        seen = run_trainers(2, outcomes, Path(name), timeout=240)[0]
    PAGE.write_text(re.sub(r"^\| callback .*?(?=\n\n|\Z)", table(seen).strip(), PAGE.read_text(), flags=re.M | re.S))
