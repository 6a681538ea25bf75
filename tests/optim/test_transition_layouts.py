"""Both ways to change optimizers, over ranks that hold parts, with checkpoints that go from one layout to another."""

import pytest
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.testing import assert_close

from lightning_hybrid.optim import SM3, Lamb, OptimizerTransition, RMSpropToSGD, linear_schedule
from tests.launch import run_trainers
from tests.small import Small, fit, hybrid, loader, trainer_of, weights

SAMPLES, BATCH = 16, 4  # four steps an epoch
SCHEDULE = linear_schedule(1, 7)  # of eight steps: alone, both over the checkpoint, alone
LAYOUTS = {
    "pipeline": {"pipeline": 2},
    "sharded": {"pipeline": 1, "zero_stage": 3},
    "tensor": {"pipeline": 1, "tensor_parallel_size": 2, "tensor_parallel_plan": {"blocks.*.linear": "colwise"}},
}
WAYS = [  # the optimizer, the layout of the first epoch and that of the second
    ("elements", "pipeline", "sharded"),
    ("rmsprop", "tensor", "sharded"),
    ("rmsprop", "sharded", "pipeline"),
    ("wholes", "sharded", "tensor"),
    ("wholes", "tensor", "pipeline"),
]


class Changing(Small):
    depth = 2

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def configure_optimizers(self):
        first, second = ([{"params": [p for p in self.parameters() if p.ndim == n]} for n in (1, 2)] for _ in range(2))
        if self.kind == "rmsprop":
            optimizer = RMSpropToSGD(first, 0.02, steps_per_epoch=4, center=1.0, period=1.0, weight_decay=0.1)
        elif self.kind == "elements":
            optimizer = OptimizerTransition(AdamW(first, 0.01), SGD(second, 0.02, momentum=0.9), SCHEDULE)
        else:
            optimizer = OptimizerTransition(SM3(first, 0.05, momentum=0.9), Lamb(second, 0.02), SCHEDULE)
        scheduler = LambdaLR(optimizer, lambda step: min(1.0, step / 3))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def end(trainer):
    """Weights, and the optimizer's whole state, on rank 0."""
    return dict(weights(trainer)), trainer.strategy.optimizer_state(trainer.optimizers[0])


def go_over(folder):
    """On a rank: each way, with a full checkpoint between the epochs."""
    ends = []
    for index, (kind, *names) in enumerate(WAYS):
        path = None
        for epoch, name in enumerate(names, 1):
            layout, module = LAYOUTS[name], Changing(kind)
            data = 2 if name == "sharded" else 1
            trainer = fit_on(module, loader(SAMPLES, BATCH, data), layout, epoch, path)
            path = folder / f"{index}.ckpt"
            if epoch == 1:
                trainer.save_checkpoint(path)
        ends.append(end(trainer))
    return ends


def fit_on(module, batches, layout, epochs, path):
    trainer = trainer_of(hybrid(**layout, state_dict_type="full"), max_epochs=epochs)
    trainer.fit(module, batches, ckpt_path=path)
    return trainer


@pytest.mark.filterwarnings("ignore:.*It has no rule for parts")
def test_any_layout_goes_on_from_any_other_as_one_process_does(tmp_path):
    """Float64; the relative error of 1e-9 is some orders above that of sums in another order."""
    found = run_trainers(2, go_over, tmp_path)[0]
    expected = {kind: end(fit(Changing(kind), loader(SAMPLES, BATCH), max_epochs=2)) for kind, *_ in WAYS}
    for (kind, *_), (values, state) in zip(WAYS, found, strict=True):
        reference, known = expected[kind]
        assert_close(values, reference, rtol=1e-9, atol=1e-12)
        assert state["param_groups"] == known["param_groups"]
        assert state["state"].keys() == known["state"].keys()
        for index, entries in known["state"].items():
            assert_close(state["state"][index], entries, rtol=1e-9, atol=1e-12)
