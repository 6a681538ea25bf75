"""The blocks that memory callbacks work with."""

from types import SimpleNamespace

import pytest
from lightning.pytorch import Trainer
from torch import nn

from lightning_hybrid.callbacks import ActivationOffload, ActivationRecompute, ParameterOffload
from lightning_hybrid.callbacks.blocks import choose_blocks
from tests.memory_models import GPT, MODELS, bits

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")


class Shared(GPT):
    """Layers that run more than once in a pass, and a second list of them."""

    def __init__(self):
        super().__init__()
        a, b, c = self.blocks[:3]
        self.blocks, self.others = nn.ModuleList([a, a, b, a]), nn.ModuleList([b, c])

    def training_step(self, batch, batch_idx):
        blocks = self.blocks
        self.blocks = nn.ModuleList([*blocks, *self.others])
        try:
            return super().training_step(batch, batch_idx)
        finally:
            self.blocks = blocks


def test_shared_blocks_are_named_once_in_the_order_of_their_first_places():
    module, trainer = Shared(), SimpleNamespace(strategy=Trainer(accelerator="cpu", logger=False).strategy)
    assert list(choose_blocks(trainer, module, ["blocks", "others"])) == ["blocks.0", "blocks.2", "others.1"]


def test_shared_blocks_are_recomputed_offloaded_and_streamed(monkeypatch):
    monkeypatch.setitem(MODELS, "Shared", Shared)
    lists = ["blocks", "others"]
    plain = bits("Shared")
    offload = ActivationOffload(blocks=lists, min_bytes=0)
    assert bits("Shared", [ActivationRecompute("sqrt", blocks=lists), offload]) == plain
    assert bits("Shared", [ActivationRecompute(blocks=lists), ParameterOffload(blocks=lists)]) == plain
