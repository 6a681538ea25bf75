"""Case 25: blocks, and modules beside them, that the user compiles."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_hybrid import add_auxiliary_loss
from tests.launch import run_trainers
from tests.small import Block, Small, check_refused, fit, hybrid, loader, weights

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"  # dynamo looks at all attributes
)
GRAPHS = []


def counting(graph, inputs):
    """A backend that runs the graph as it is and counts it."""
    GRAPHS.append(graph)
    return graph.forward


class Inner(nn.Linear):
    """A class of our own: dynamo leaves torch's own modules alone when they are the outermost."""

    def forward(self, x):
        return super().forward(x) * 1.0


class Plain(Small):
    depth = 10  # above dynamo's limit of 8 versions of one code

    def __init__(self):
        super().__init__()
        self.inlet, self.outlet = Inner(6, 6).double(), Inner(6, 1).double()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


class Compiled(Plain):
    backend = "eager"

    def configure_model(self):
        for module in [*self.blocks, self.inlet, self.outlet]:
            module.compile(backend=self.backend)


class Counted(Compiled):
    backend = staticmethod(counting)


class AheadOfTime(Compiled):
    backend = "aot_eager"


class MixingBlock(Block):
    """Random numbers, an auxiliary loss, and a second argument."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.0)

    def forward(self, x, bias):
        y = self.dropout(super().forward(x)) + bias
        return add_auxiliary_loss(y, 0.01 * y.square().mean())


class Mixing(Plain):
    block, depth = MixingBlock, 4

    def forward(self, x):
        bias = self.inlet(x)
        for block in self.blocks:
            x = checkpoint(block, x, bias, use_reentrant=False)
        return self.outlet(x)


class CompiledMixing(Mixing):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.compile(backend="aot_eager")


PAIRS = {"counted": (Counted, Plain), "ahead of time": (AheadOfTime, Plain), "mixing": (CompiledMixing, Mixing)}
LAYOUTS = [
    ({}, 1, ["counted", "ahead of time"]),
    ({"chunks": 2}, 1, ["counted", "mixing"]),
    ({"zero_stage": 1}, 2, ["counted"]),
]


def trained(options, data, names, folder):
    """On a rank: the weights of each model, which it also saves, and how many graphs were made of the first."""
    states, graphs = [], []
    for name in names:
        trainer = fit(PAIRS[name][0](), loader(8, 4, data), hybrid(**options), loader(4, 4))
        states.append(weights(trainer))
        trainer.save_checkpoint(f"{folder}/{name}.ckpt")
        graphs.append(len(GRAPHS))
    return states, graphs[0]


@pytest.mark.parametrize(("options", "data", "names"), LAYOUTS, ids=str)
def test_compiled_modules_train_exactly_under_their_names_and_run_compiled(options, data, names, tmp_path):
    outcomes = run_trainers(2 * data, trained, options, data, names, str(tmp_path))
    for state, name in zip(outcomes[0][0], names, strict=True):
        compiled, plain = PAIRS[name]
        torch.testing.assert_close(state, dict(weights(fit(plain(), loader(8, 4), "auto", loader(4, 4)))))
        for model in (plain, compiled):
            loaded = model.load_from_checkpoint(tmp_path / f"{name}.ckpt", map_location="cpu", weights_only=True)
            torch.testing.assert_close(dict(loaded.state_dict()), state, rtol=0, atol=0)
    for _, graphs in outcomes:
        assert 2 <= graphs <= 6  # one for all blocks, in training and evaluation, not one for each


def resumed(folder):
    """On a rank: a compiled model under a pipeline goes on from a plain one's weights, and what it had trained then."""
    module = Counted.load_from_checkpoint(f"{folder}/plain.ckpt", map_location="cpu", weights_only=True)
    return weights(fit(module, loader(8, 4), hybrid(), loader(4, 4)))


def test_a_plain_models_checkpoint_goes_on_compiled(tmp_path):
    plain = Plain()
    fit(plain, loader(8, 4), "auto", loader(4, 4)).save_checkpoint(tmp_path / "plain.ckpt")
    found = run_trainers(2, resumed, str(tmp_path))[0]
    torch.testing.assert_close(found, dict(weights(fit(plain, loader(8, 4), "auto", loader(4, 4)))))


class Wrapped(Small):
    def __init__(self):
        super().__init__()
        self.blocks[1] = torch.compile(self.blocks[1], backend="eager")


class WrappedHead(Small):
    def __init__(self):
        super().__init__()
        self.outlet = torch.compile(self.outlet, backend="eager")


class Whole(Small):
    def __init__(self):
        super().__init__()
        self.compile(backend="eager")


class Body(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.layers = blocks

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Ancestor(Small):
    def __init__(self):
        super().__init__()
        self.body = Body(self.blocks)
        del self.blocks
        self.body.compile(backend="eager")

    def forward(self, x):
        return self.outlet(self.body(self.inlet(x)))


class Step(Small):
    @torch.compile(backend="eager")
    def training_step(self, batch, batch_idx):
        return self.loss(batch)


class Forward(Small):
    def __init__(self):
        super().__init__()
        self.forward = torch.compile(self.forward, backend="eager")


REFUSED = {
    Wrapped: r"blocks\.1 is the result of torch\.compile.*_orig_mod.*self\.blocks\.1\.compile\(\)",
    WrappedHead: r"outlet is the result of torch\.compile.*self\.outlet\.compile\(\)",
    Whole: r"Whole is compiled and runs blocks\.0 to blocks\.5, .*block\.compile\(\)",
    Ancestor: r"body is compiled and runs body\.layers\.0 to",
    Step: r"Step\.training_step is compiled and runs",
    Forward: r"Forward\.forward is compiled and runs",
}


def test_what_compiles_across_stages_or_changes_names_is_refused():
    check_refused(REFUSED)


def test_without_a_pipeline_only_names_matter():
    check_refused({Wrapped: REFUSED[Wrapped]}, pipeline=1)


def compiled_whole():
    with pytest.raises(RuntimeError, match="compiled model is incompatible with the current strategy"):
        fit(torch.compile(Small(), backend="eager"), loader(8, 4), hybrid())


def test_a_compiled_lightning_module_is_refused_by_lightning():
    run_trainers(2, compiled_whole)
