"""Where a step's numbers stop being finite; that of outputs within runs is in `test_rollback_retries`."""

import pytest
import torch
from lightning.pytorch import Callback

from lightning_hybrid.callbacks.first_not_finite import SUM, FirstNotFinite
from tests.callbacks.test_divergence_rollback import LAYOUTS, MODELS, Made, Scheduled, data, run
from tests.callbacks.test_rollback_retries import MARK, Marked, audit, named
from tests.launch import run_trainers
from tests.small import Block, Small, loader, trainer_of, weights


class Rooted(Block):
    """In the fourth of the blocks, a sample that has a mark is at a root's infinite slope; all outputs are finite."""

    def forward(self, x):
        linear = self.linear(x)
        at_zero = self.breaks & (x.abs() > MARK / 2).any(-1, keepdim=True)
        return x + torch.tanh(linear) * torch.where(at_zero, 0 * linear, torch.ones_like(linear)).sqrt()


class MarkedRoot(Marked):
    block = Rooted


@pytest.mark.parametrize(
    ("options", "size", "rank", "micro_batch"),
    [
        (None, 2, 1, 0),
        ({"pipeline": 1, "zero_stage": 3}, 2, 1, 1),
        ({"pipeline": 2, "chunks": 2, "microbatches": 2}, 2, 0, 1),
    ],
    ids=str,
)
def test_a_backward_pass_is_told_by_its_first_gradient(options, size, rank, micro_batch, tmp_path):
    """As in its neighbour in `test_rollback_retries`; the gradients are summed when the step is judged."""
    expected = {"module": "gradient of blocks.3.linear", "rank": rank, "batch": 2, "micro_batch": micro_batch}
    for found in run_trainers(size, named, options, MarkedRoot, 11, (), str(tmp_path / "audit.csv")):
        assert found == expected | {"batches": "2"}
    assert audit(tmp_path / "audit.csv")[0]["reason"] == "gradient norm is nan"


class Looking(Callback):
    """Looks at a fit's first batches, where blocks give infinities whenever a probe runs them."""

    def on_train_start(self, trainer, pl_module):
        cut, self.probed = trainer.strategy.assembly.engine.cut, 0

        def broken(module, args, output):
            if cut is not None and cut.keeper.active.is_probe:
                self.probed += 1
                return output * torch.inf
            return None

        for block in pl_module.blocks:
            block.register_forward_hook(broken)
        self.search = FirstNotFinite(trainer, pl_module).__enter__()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.search.__exit__(None, None, None)
            self.found = self.search.found()


def looked_at(model, make, replicas):
    """On a rank: what is found where all is finite, and the weights with and without looking."""
    looking, both = Looking(), []
    for callbacks in ([looking], []):
        trainer = run(model, data(4, replicas=replicas), *callbacks, strategy=make(), use_distributed_sampler=False)
        both.append(weights(trainer))
    return looking.found, looking.probed, *both


@pytest.mark.parametrize("name", ["interleaved", "zero 3", "tensor 2"])
def test_probes_are_not_looked_at_and_looking_changes_nothing(name):
    options, size = LAYOUTS[name]
    replicas = size // options["pipeline"] // options.get("tensor_parallel_size", 1)
    for found, probed, looked, plain in run_trainers(
        size, looked_at, MODELS.get(name, Scheduled), Made(options), replicas
    ):
        assert found is None
        assert bool(probed) == (options["pipeline"] > 1)
        torch.testing.assert_close(looked, plain, rtol=0, atol=0)


class Huge(Small):
    """Only a weight's gradient is too large for its type."""

    def loss(self, batch):
        return (self.outlet(torch.full_like(batch[0], 1e200)) * 1e150).sum()

    def on_train_start(self):
        torch.nn.init.zeros_(self.outlet.weight)
        torch.nn.init.zeros_(self.outlet.bias)


def test_a_sum_of_gradients_is_told_without_a_rank():
    class Finding(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.search = FirstNotFinite(trainer, pl_module).__enter__()

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            self.found = self.search.found()
            self.search.__exit__(None, None, None)

    finding = Finding()
    trainer_of(callbacks=[finding]).fit(Huge(), loader(4, 4))
    assert finding.found.kind == SUM
    assert finding.found.shown(7) == {"module": "gradient of outlet.weight"}


@pytest.mark.parametrize("own", [True, False])
def test_nothing_stays_after_an_exception(own):
    module, trainer = Small(), trainer_of()
    trainer.fit(module, loader(4, 4))
    step = module.training_step
    if own:  # as of a module that torch.compile was called on
        module.training_step = step
    with pytest.raises(ValueError, match="not enough values"), FirstNotFinite(trainer, module):
        module.training_step([], 0)
    assert not any(part._forward_hooks for part in module.modules())
    assert vars(module).get("training_step") is (step if own else None)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_modules_run_as_they_are_written():
    """Their hooks see what is within them, and their code is not compiled anew for it."""
    compiled = []

    def backend(graph, examples):
        compiled.append(graph)
        return graph.forward

    module, trainer = Small(), trainer_of()
    module.blocks[3].compile(backend=backend, fullgraph=True)
    trainer.fit(module, loader(4, 4))
    before = len(compiled)
    torch.nn.init.constant_(module.blocks[3].linear.weight, torch.nan)
    batch = next(iter(loader(4, 4)))
    with FirstNotFinite(trainer, module) as search:
        module.training_step(batch, 0)
    assert search.found().module == "blocks.3.linear"
    module.training_step(batch, 0)
    assert len(compiled) == before == 1
