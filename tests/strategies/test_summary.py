from types import SimpleNamespace

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from torch import nn

from lightning_hybrid.strategies.summary import SummaryBeforeCut


class Telling(ModelSummary):
    """Notes how many parameters it was shown."""

    def __init__(self):
        super().__init__()
        self.told = []

    def on_fit_start(self, trainer, pl_module):
        self.told.append(sum(p.numel() for p in pl_module.parameters()))


class Other(Callback):
    def __init__(self):
        self.started = 0

    def on_fit_start(self, trainer, pl_module):
        self.started += 1


def model():
    module = LightningModule()
    module.layers = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    return module


def start(trainer, module):
    for callback in trainer.callbacks:
        callback.on_fit_start(trainer, module)


def test_summaries_speak_once_about_the_whole_model_and_other_callbacks_as_usual():
    first, second, other, module = Telling(), Telling(), Other(), model()
    trainer, summary = SimpleNamespace(callbacks=[first, other, second]), SummaryBeforeCut()
    summary.show(trainer, module)
    del module.layers[1]  # the cut
    start(trainer, module)
    assert first.told == second.told == [8]
    assert other.started == 1


def test_a_second_show_stays_silent_and_a_new_callback_speaks():
    first, late, module = Telling(), Telling(), model()
    summary = SummaryBeforeCut()
    summary.show(SimpleNamespace(callbacks=[first]), module)
    summary.show(SimpleNamespace(callbacks=[first, late]), module)
    assert (first.told, late.told) == ([8], [8])


def test_callbacks_get_their_voice_back():
    callback, module = Telling(), model()
    trainer, summary = SimpleNamespace(callbacks=[callback]), SummaryBeforeCut()
    summary.show(trainer, module)
    summary.restore()
    summary.restore()
    start(trainer, module)
    assert callback.told == [8, 8]
    assert "on_fit_start" not in vars(callback)


@pytest.mark.filterwarnings("ignore:.*GPU available but not used:UserWarning")
def test_lightnings_own_summary_prints_the_whole_model_once(capsys):
    callback, module = RichModelSummary(), model()
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[callback])
    summary = SummaryBeforeCut()
    summary.show(trainer, module)
    printed = capsys.readouterr().out
    start(trainer, module)
    assert "8" in next(line for line in printed.splitlines() if "Total params" in line)
    assert "Total params" not in capsys.readouterr().out
