"""Groups that are split behave as groups that were made by hand before the schedulers."""

import inspect

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from lightning_hybrid.callbacks import WeightDecayRules
from lightning_hybrid.optim import OptimizerTransition

SOURCES = [0, 0, 1, 1, 1]  # of each group after the split, the one it comes from
RULES = {"*.bias": 0, "last": 2.0}


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1)


def options(lr, decay):
    return {"lr": lr, "momentum": 0.8 + lr, "weight_decay": decay}


def before_rules(module):
    """An optimizer of two groups."""
    behind = [*module.middle.parameters(), *module.last.parameters()]
    groups = [{"params": list(module.first.parameters())}, {"params": behind}]
    return torch.optim.SGD([groups[0] | options(0.1, 0.5), groups[1] | options(0.02, 0.25)])


def by_hand(module):
    """The same with the groups that the rules make."""
    first, middle, last = module.first, module.middle, module.last
    groups = [
        {"params": [first.weight], **options(0.1, 0.5)},
        {"params": [first.bias], **options(0.1, 0.0)},
        {"params": [middle.weight], **options(0.02, 0.25)},
        {"params": [middle.bias, last.bias], **options(0.02, 0.0)},
        {"params": [last.weight], **options(0.02, 0.5)},
    ]
    return torch.optim.SGD(groups)


def halve(epoch):
    return 0.5**epoch


def slowly(epoch):
    return 1 / (1 + epoch)


def sequential(optimizer, each):
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.ExponentialLR(optimizer, 0.5)], [2])


def chained(optimizer, each):
    parts = [lr_scheduler.ConstantLR(optimizer, 0.3, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


SCHEDULERS = {  # how to make each: `each` repeats what is given for each of the two groups
    "LambdaLR": lambda o, each: lr_scheduler.LambdaLR(o, each([halve, slowly])),
    "MultiplicativeLR": lambda o, each: lr_scheduler.MultiplicativeLR(o, each([halve, slowly])),
    "StepLR": lambda o, each: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o, each: lr_scheduler.MultiStepLR(o, [1, 3]),  # as many as groups
    "ConstantLR": lambda o, each: lr_scheduler.ConstantLR(o, total_iters=3),
    "LinearLR": lambda o, each: lr_scheduler.LinearLR(o, 0.25, total_iters=4),
    "ExponentialLR": lambda o, each: lr_scheduler.ExponentialLR(o, 0.7),
    "SequentialLR": sequential,
    "PolynomialLR": lambda o, each: lr_scheduler.PolynomialLR(o, 4, 2.0),
    "CosineAnnealingLR": lambda o, each: lr_scheduler.CosineAnnealingLR(o, 4, 0.01),
    "ChainedScheduler": chained,
    "ReduceLROnPlateau": lambda o, each: lr_scheduler.ReduceLROnPlateau(o, patience=0, min_lr=each([0.005, 0.001])),
    "CyclicLR": lambda o, each: lr_scheduler.CyclicLR(
        o, each([0.01, 0.02]), each([0.1, 0.3]), 2, base_momentum=each([0.7, 0.8]), max_momentum=each([0.9, 0.95])
    ),
    "CosineAnnealingWarmRestarts": lambda o, each: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o, each: lr_scheduler.OneCycleLR(o, each([0.3, 0.5]), 6),  # two phases
    "SWALR": lambda o, each: SWALR(o, each([0.05, 0.3]), 3),
}


def rates(optimizer, scheduler, plateau):
    """Rates, momenta and what the scheduler says of them, over five steps."""
    seen = []
    for step in range(6):
        groups = [(group["lr"], group["momentum"]) for group in optimizer.param_groups]
        seen.append((groups, list(scheduler.get_last_lr())))
        optimizer.step()
        scheduler.step(*([float(step)] if plateau else []))
    return seen


def test_every_scheduler_of_torch_is_tried():
    classes = {name for name, kind in inspect.getmembers(lr_scheduler, inspect.isclass) if not name.startswith("_")}
    kinds = {name for name in classes if issubclass(getattr(lr_scheduler, name), lr_scheduler.LRScheduler)}
    assert kinds - {"LRScheduler"} == SCHEDULERS.keys() - {"SWALR"}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_made_before_gives_the_rates_of_groups_by_hand(name):
    make, module = SCHEDULERS[name], Layers()
    optimizer, expected = before_rules(module), by_hand(module)
    scheduler, reference = make(optimizer, list), make(expected, lambda two: [two[source] for source in SOURCES])
    WeightDecayRules(RULES).apply(optimizer, module, [scheduler])
    keys = {key for group in expected.param_groups for key in group} - {"params"}
    for group, other in zip(optimizer.param_groups, expected.param_groups, strict=True):
        assert list(map(id, group["params"])) == list(map(id, other["params"]))
        assert {key: group[key] for key in keys} == {key: other[key] for key in keys}
        assert group.keys() == other.keys()
    plateau = name == "ReduceLROnPlateau"
    found = rates(optimizer, scheduler, plateau)
    assert found == rates(expected, reference, plateau)
    assert found[0] != found[5]


def test_rates_that_are_tensors_are_no_longer_shared():
    module = Layers()
    optimizer = torch.optim.AdamW(module.parameters(), torch.tensor(0.5), foreach=False)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    WeightDecayRules(RULES).apply(optimizer, module, [scheduler])
    optimizer.step()
    scheduler.step()
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.25] * 3
    assert len({group["lr"].data_ptr() for group in optimizer.param_groups}) == 3
    assert scheduler.get_last_lr() == [0.25] * 3


def test_groups_that_need_no_split_stay_and_names_follow_their_parameters():
    module = Layers()
    optimizer = torch.optim.SGD(
        [
            {"params": list(module.last.named_parameters())},
            {"params": [("own name", module.middle.bias)]},
        ],
        weight_decay=0.5,
    )
    groups, (_, alone) = optimizer.param_groups, optimizer.param_groups
    WeightDecayRules(RULES | {"middle.bias": 0.25}).apply(optimizer, module)
    assert optimizer.param_groups is groups
    assert [group["param_names"] for group in groups] == [["bias"], ["weight"], ["own name"]]
    assert groups[2] is alone
    assert [group["weight_decay"] for group in groups] == [0, 1, 0]


def test_groups_without_parameters_stay():
    module = Layers()
    optimizer = torch.optim.SGD([{"params": []}, {"params": list(module.last.parameters())}], weight_decay=0.5)
    WeightDecayRules(RULES).apply(optimizer, module)
    assert [(len(g["params"]), g["weight_decay"]) for g in optimizer.param_groups] == [(0, 0.5), (1, 0), (1, 1)]


def test_all_weight_decays_are_multiplied_and_switches_are_not():
    module = Layers()
    optimizer = torch.optim.Adam(module.parameters(), weight_decay=0.5, decoupled_weight_decay=True)
    for group in optimizer.param_groups:
        group |= {"first_weight_decay": 0.25, "second_weight_decay": 2, "no_weight_decay": None}
    WeightDecayRules({"last": 3}).apply(optimizer, module)
    decays = ("weight_decay", "first_weight_decay", "second_weight_decay", "decoupled_weight_decay", "no_weight_decay")
    assert [[group[name] for name in decays] for group in optimizer.param_groups] == [
        [0.5, 0.25, 2, True, None],
        [1.5, 0.75, 6, True, None],
    ]


def test_both_optimizers_of_a_transition_step_with_decays_by_rule():
    ends, decays = [], (0.5, 0, 1)
    for is_by_hand in (True, False):
        torch.manual_seed(0)
        module = Layers().double()
        biases, last = [p for name, p in module.named_parameters() if "bias" in name], [module.last.weight]
        parts = [[module.first.weight, module.middle.weight], biases, last]
        hand = [{"params": part, "weight_decay": decay} for part, decay in zip(parts, decays, strict=True)]
        given = hand if is_by_hand else [{"params": list(module.parameters()), "weight_decay": decays[0]}]
        pair = [kind([dict(group) for group in given], 0.1) for kind in (torch.optim.SGD, torch.optim.AdamW)]
        transition = OptimizerTransition(*pair, lambda step: step / 2)
        if not is_by_hand:
            WeightDecayRules(RULES).apply(transition, module)
        for _ in range(3):
            for parameter in module.parameters():
                parameter.grad = parameter.detach().cos()
            transition.step()
        ends.append(module.state_dict())
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_rules_with_one_multiplier_share_a_group_and_are_applied_once():
    module = Layers()
    optimizer = torch.optim.SGD(module.parameters(), weight_decay=0.5)
    for _ in range(2):
        WeightDecayRules({"last": 2, "*.bias": 0, "middle": 2}).apply(optimizer, module)
    assert [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups] == [
        (1, 0.5),
        (3, 1.0),
        (2, 0.0),
    ]
    with pytest.raises(ValueError, match=r"SGD have been multiplied by the rules {'last': 2.* now rules={'last': 3}"):
        WeightDecayRules({"last": 3}).apply(optimizer, module)


class Warmup(lr_scheduler.LRScheduler):
    """Another's, with a list by group of its own."""

    def __init__(self, optimizer):
        self.peaks = [group["lr"] for group in optimizer.param_groups]
        super().__init__(optimizer)

    def get_lr(self):
        return [min(1, (self.last_epoch + 1) / 3) * peak for peak in self.peaks]


class Foreign:
    """Of no class of torch's."""

    def __init__(self, optimizer):
        self.optimizer, self.values = optimizer, torch.tensor([group["lr"] for group in optimizer.param_groups])


class Halving(lr_scheduler.LambdaLR):
    """Another's, with no list by group but those of torch's class."""

    def __init__(self, optimizer):
        self.text, self.number = "ab", 2
        super().__init__(optimizer, halve)


class Holder(lr_scheduler.LRScheduler):
    """Steps another scheduler."""

    def __init__(self, optimizer, inner):
        self.inner = inner
        super().__init__(optimizer)

    def get_lr(self):
        return self.inner.get_last_lr()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Warmup, "Warmup.peaks"),
        (Foreign, "Foreign.values"),
        (lambda optimizer: Holder(optimizer, Warmup(optimizer)), "Warmup.peaks"),
    ],
)
def test_lists_that_nobody_knows_are_refused_before_anything_has_changed(make, name):
    module = Layers()
    optimizer = before_rules(module)
    scheduler = make(optimizer)
    before = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(ValueError, match=rf"{name} has as many entries .* groups, 2, .*\.apply\(optimizer, self\)"):
        WeightDecayRules(RULES).apply(optimizer, module, [scheduler])
    assert [group.keys() for group in optimizer.param_groups] == [group.keys() for group in before]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.25]
    WeightDecayRules(RULES).apply(optimizer, module, [])  # the way out
    assert len(make(optimizer).optimizer.param_groups) == 5


def test_schedulers_of_others_follow_if_torch_keeps_their_lists():
    module = Layers()
    optimizer = before_rules(module)
    scheduler = Holder(optimizer, Halving(optimizer))
    WeightDecayRules(RULES).apply(optimizer, module, [scheduler])
    optimizer.step()
    scheduler.inner.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.05, 0.01, 0.01, 0.01]
    assert scheduler.inner.get_last_lr() == scheduler.get_last_lr()


class Wrapping(torch.optim.Optimizer):
    """Has groups of its own beside those of another optimizer."""

    def __init__(self, inner):
        super().__init__([dict(group) for group in inner.param_groups], {})
        self.inner = inner


def test_optimizers_that_rules_cannot_work_on_are_refused():
    module, rules = Layers(), WeightDecayRules(RULES)
    with pytest.raises(ValueError, match=r"Group 0 of Rprop has no option weight_decay .* but .*etas, foreach, lr"):
        rules.apply(torch.optim.Rprop(module.parameters()), module)
    with pytest.raises(ValueError, match=r"Wrapping.inner is a SGD with groups of its own.* Give .*apply the SGD"):
        rules.apply(Wrapping(before_rules(module)), module)
    with pytest.raises(ValueError, match=r"SGD holds a tensor of shape \[2\] that is not a parameter of the module"):
        rules.apply(torch.optim.SGD([torch.zeros(2, requires_grad=True)], weight_decay=1), module)
