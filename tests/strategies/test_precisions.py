from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.plugins import DoublePrecision, FSDPPrecision, HalfPrecision, MixedPrecision, Precision
from torch import nn

from lightning_hybrid import HybridPTDPStrategy
from lightning_hybrid.functional.loss_scale import ScaleState, next_scale
from lightning_hybrid.precision import FP16MasterWeights, MasterWeights
from lightning_hybrid.strategies.precisions import check_precision, ours
from tests.launch import run_trainers
from tests.small import Small, fit, hybrid, loader, trainer_of


class Mine(Precision):
    """A user's own, without any idea of 16 bits."""


class Rounding(HalfPrecision):
    """A user's own, which keeps no masters."""


@pytest.mark.parametrize(
    "plugin",
    [Precision, DoublePrecision, Mine, MasterWeights, FP16MasterWeights, lambda: MixedPrecision("bf16-mixed", "cpu")],
)
def test_what_keeps_no_loss_scale_of_its_own_passes(plugin):
    kept = plugin()
    check_precision(kept)
    assert ours(kept) is kept


REFUSED = {
    "Rounding": lambda: Rounding("bf16-true"),
    "FSDPPrecision": lambda: FSDPPrecision("bf16-true"),
    "SimpleNamespace": lambda: SimpleNamespace(precision="transformer-engine"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_name_with_those_that_work(name):
    plugin = REFUSED[name]()
    with pytest.raises(
        ValueError, match=rf"{name} with precision='{plugin.precision}' does not work.*32-true, 64-true, .*16-true"
    ):
        check_precision(plugin)


def test_lightnings_plugin_for_16_bits_makes_way_for_ours():
    strategy = HybridPTDPStrategy()
    strategy.precision_plugin = HalfPrecision("bf16-true")
    assert type(strategy.precision_plugin) is MasterWeights
    assert strategy.precision_plugin.compute_dtype is torch.bfloat16


def refusal_of_plugin():
    with pytest.raises(ValueError, match="Rounding with precision='bf16-true' does not work") as caught:
        trainer_of(hybrid(), plugins=[Rounding("bf16-true")]).fit(Small(), loader(8, 4))
    return str(caught.value)


def test_a_plugin_object_is_refused_on_every_rank():
    assert len(set(run_trainers(2, refusal_of_plugin))) == 1


def refusal_of_strategies(names):
    for strategy in names:
        for plugin in (MasterWeights, FP16MasterWeights):
            with pytest.raises(ValueError, match=f"{plugin.__name__} works with .* strategy='hybrid_zero1'"):
                fit(Small(), loader(8, 4), strategy, plugins=[plugin()])
    return True


def test_masters_need_a_strategy_of_this_package():
    assert refusal_of_strategies(["auto"])
    assert run_trainers(2, refusal_of_strategies, ["ddp"]) == [True, True]


class ByHand(Small):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Factored(Small):
    def configure_optimizers(self):
        return torch.optim.Adafactor(self.parameters())


class Sparse(Small):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 6, sparse=True)


def refusals_of_sparse(options):
    module = Sparse()
    with pytest.raises(
        ValueError, match="embedding has sparse=True, and replicas, shards and master weights"
    ) as caught:
        trainer_of(hybrid(1), **options).fit(module, loader(8, 4))
    return str(caught.value)


def test_sparse_gradients_are_refused_where_they_cannot_be_summed_or_unscaled():
    assert run_trainers(1, refusals_of_sparse, {"precision": "16-true"})
    assert len(set(run_trainers(2, refusals_of_sparse, {}))) == 1


def refusals_of_modules():
    for model, message in (
        (ByHand, "automatic_optimization=False with precision='bf16-true'"),
        (Factored, "Adafactor"),
    ):
        module = model()
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        with pytest.raises(ValueError, match=message):
            fit(module, loader(8, 4), hybrid(1, microbatches=1), precision="bf16-true")
        assert all(torch.equal(before[name], p) for name, p in module.named_parameters())
    return True


def test_what_would_train_the_copies_is_refused():
    assert run_trainers(1, refusals_of_modules) == [True]


def test_a_scaler_that_was_given_to_lightnings_plugin_keeps_its_numbers():
    scaler = torch.amp.GradScaler("cpu", init_scale=32.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=7)
    strategy = HybridPTDPStrategy()
    strategy.precision_plugin = MixedPrecision("16-mixed", "cpu", scaler)
    plugin = strategy.precision_plugin
    assert type(plugin) is FP16MasterWeights
    assert plugin.loss_scale == 32.0
    steps = [next_scale(ScaleState(32.0, clean_steps=6), plugin.rule, overflow=overflow) for overflow in (False, True)]
    assert [state.scale for state in steps] == [128.0, 8.0]
    strategy.precision_plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", enabled=False))
    assert strategy.precision_plugin.loss_scale == 1.0
    assert strategy.precision_plugin.rule is None
    strategy.precision_plugin = HalfPrecision("16-true")
    assert strategy.precision_plugin.loss_scale == 2.0**16


def named():
    found = []
    objects = [{"plugins": [plugin]} for plugin in (HalfPrecision("16-true"), FP16MasterWeights())]
    for options in ({"precision": "16-true"}, *objects):
        trainer = trainer_of("hybrid_ptdp", **options)
        found.append(type(trainer.precision_plugin) is FP16MasterWeights)
    return found


def test_names_and_objects_select_the_same():
    assert named() == [True] * 3
