"""Rules of weight decay under a Trainer: any optimizer and strategy trains as with groups that were made by hand."""

import json
import sys
from collections import OrderedDict
from types import MethodType

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from lightning_hybrid import HybridPTDPStrategy
from lightning_hybrid.callbacks import WeightDecayRules
from lightning_hybrid.cli.main import main
from tests.launch import run_ranks, run_trainers
from tests.small import WIDTH, Small, fit, loader, trainer_of, weights

DECAY = 0.3
PLAN = {"*.fc1": "colwise", "*.fc2": "rowwise"}
LAYOUTS = {  # of two ranks
    "pipeline 2": {"pipeline_parallel_size": 2, "num_microbatches": 2},
    "zero 3": {"pipeline_parallel_size": 1, "num_microbatches": 2, "zero_stage": 3},
    "tensor 2": {"pipeline_parallel_size": 1, "tensor_parallel_size": 2, "tensor_parallel_plan": PLAN},
}


class Mlp(nn.Module):
    """A block that tensor parallelism splits."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x):
        return x + self.fc2(torch.tanh(self.fc1(self.norm(x))))


class Net(Small):
    block, depth = Mlp, 2

    def groups(self):
        return self.parameters()

    def schedule(self, optimizer):
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_optimizers(self):
        return self.schedule(torch.optim.SGD(self.groups(), self.rate, momentum=0.9, weight_decay=DECAY))


class ByHand(Net):
    """The groups that the rules make."""

    def groups(self):
        named = dict(self.named_parameters())
        biases = [p for name, p in named.items() if name.endswith("bias")]
        norms = [p for name, p in named.items() if "norm.weight" in name]
        outlet = [self.outlet.weight]
        others = [p for p in named.values() if all(p is not other for other in biases + norms + outlet)]
        decays = [(others, 1), (biases, 0), (norms, 0.5), (outlet, 2)]
        return [{"params": group, "weight_decay": DECAY * factor} for group, factor in decays]


class EachEpoch(ByHand):
    def schedule(self, optimizer):
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Bare(Net):
    """Leaves the optimizer to the command line."""

    configure_optimizers = LightningModule.configure_optimizers


class Data(LightningDataModule):
    def __init__(self, data: int = 1):
        super().__init__()
        self.data = data

    def train_dataloader(self):
        return loader(12, 4, self.data)


def rules():
    return WeightDecayRules({"*.bias": 0, nn.LayerNorm: 0.5, "outlet": 2.0})


def steps(module, strategy="auto", data=1, **options):
    """The Trainer after three steps, or after the three that follow on those of a checkpoint."""
    path = options.pop("ckpt_path", None)
    trainer = trainer_of(strategy, **options)
    trainer.fit(module, loader(12, 4, data), ckpt_path=path)
    return trainer


def data_ranks(layout):
    return 2 if "zero" in layout else 1


def by_layout(folder):
    """On a rank: weights after three steps under each layout, and after three more that follow on those of a file."""
    found = {}
    for layout, options in LAYOUTS.items():
        trainer = steps(Net(), HybridPTDPStrategy(**options), data_ranks(layout), callbacks=[rules()])
        trainer.save_checkpoint(folder / f"{layout}.ckpt")
        on = {"max_epochs": 2, "ckpt_path": folder / f"{next(iter(LAYOUTS))}.ckpt", "callbacks": [rules()]}
        more = steps(Net(), HybridPTDPStrategy(**options), data_ranks(layout), **on)
        found[layout] = weights(trainer), weights(more)
    return found


def test_layouts_train_and_resume_as_one_process_with_groups_by_hand(tmp_path, capsys):
    expected = steps(ByHand()), steps(ByHand(), max_epochs=2)
    plain = steps(Net())
    assert all(not torch.equal(value, weights(plain)[name]) for name, value in weights(expected[0]).items())
    found = run_trainers(2, by_layout, tmp_path)[0]
    for layout in LAYOUTS:
        for state, reference in zip(found[layout], expected, strict=True):
            torch.testing.assert_close(state, dict(weights(reference)), rtol=1e-9, atol=0)
        resumed = steps(Net(), max_epochs=2, callbacks=[rules()], ckpt_path=tmp_path / f"{layout}.ckpt")
        torch.testing.assert_close(dict(weights(resumed)), dict(weights(expected[1])), rtol=1e-9, atol=0)


CONFIG = """
seed_everything: 0
model: tests.callbacks.test_weight_decay_rules.Bare
data: {{class_path: tests.callbacks.test_weight_decay_rules.Data, init_args: {{data: {data}}}}}
optimizer: {{class_path: torch.optim.SGD, init_args: {{lr: 0.02, momentum: 0.9, weight_decay: 0.3}}}}
lr_scheduler: {{class_path: torch.optim.lr_scheduler.ExponentialLR, init_args: {{gamma: 0.5}}}}
trainer:
  accelerator: cpu
  devices: {devices}
  max_epochs: 2
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  default_root_dir: {folder}
  strategy: {strategy}
  callbacks:
    - class_path: WeightDecayRules
      init_args:
        rules:
          "*.bias": 0
          LayerNorm: 0.5
          outlet: 2.0
    - class_path: ModelCheckpoint
      init_args: {{dirpath: {folder}, filename: last}}
"""


def command(folder, strategy="auto", devices=1, data=1):
    """Runs LightningCLI, which makes the optimizer from `model.parameters()`, over two epochs; the weights."""
    sys.argv[1:] = []  # Lightning warns of arguments given twice
    folder.mkdir(exist_ok=True)
    path = folder / "given.yaml"
    path.write_text(CONFIG.format(folder=folder, strategy=json.dumps(strategy), devices=devices, data=data))
    main(["fit", "--config", str(path)])
    return torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]


def commands(folder):
    """On a rank: as `command`, under each layout."""
    hybrid = "lightning_hybrid.HybridPTDPStrategy"
    found = [command(folder / "ddp", "ddp", 2, 2)]
    for layout, options in LAYOUTS.items():
        strategy = {"class_path": hybrid, "init_args": options}
        found.append(command(folder / layout, strategy, 2, data_ranks(layout)))
    return found


def test_configurations_train_as_groups_by_hand_with_every_strategy(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["lightning-hybrid"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of what LightningCLI calls
    expected = dict(weights(steps(EachEpoch(), max_epochs=2)))
    torch.testing.assert_close(command(tmp_path / "one"), expected, rtol=0, atol=0)
    for found in run_trainers(2, commands, tmp_path)[0]:
        torch.testing.assert_close(dict(found), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, ValueError, r"rules={}: give patterns with their multipliers"),
        (["*.bias"], ValueError, r"rules=\['\*.bias'\]: give patterns with their multipliers"),
        ({"head": -1}, ValueError, r"rules\['head'\]=-1 must be finite and at least 0"),
        ({"head": float("nan")}, ValueError, r"rules\['head'\]=nan must be finite"),
        ({"head": float("inf")}, ValueError, r"rules\['head'\]=inf must be finite"),
        ({"head": True}, TypeError, r"rules\['head'\]=True is no number"),
        ({"head": "0"}, TypeError, r"rules\['head'\]='0' is no number"),
        ({3: 0}, TypeError, "rules has the key 3: give a pattern of names or a type of modules"),
        ({torch.Tensor: 0}, TypeError, "has the key .*Tensor.*: give a pattern"),
    ],
)
def test_rules_that_cannot_be_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        WeightDecayRules(given)


def begun(callback, module):
    """What `configure_optimizers` gives in a fit that begins with a callback."""
    trainer = trainer_of(callbacks=[callback])
    callback.setup(trainer, module, "fit")
    configured = module.configure_optimizers()
    callback.teardown(trainer, module, "fit")
    return configured


def test_table_says_what_each_rule_came_to(capsys):
    callback = rules()
    steps(Net(), callbacks=[callback])
    (printed,) = [part for part in capsys.readouterr().out.split("Weight decay by rule") if "multiplier" in part]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if line.startswith("│")]
    assert rows == [
        ["*.bias", "0", "0", "8", "47", "inlet.bias, outlet.bias, blocks.0.norm.bias, ..."],
        ["LayerNorm", "0.5", "0.15", "2", "12", "blocks.0.norm.weight, blocks.1.norm.weight"],
        ["outlet", "2", "0.6", "1", "6", "outlet.weight"],
        ["(all others)", "1", "0.3", "5", "228", "inlet.weight, blocks.0.fc1.weight, blocks.0.fc2.weight, ..."],
    ]
    assert callback.table().row_count == 4


def test_rules_without_parameters_are_named_once():
    with pytest.warns(UserWarning, match=r"No parameter falls under 'haed', 'fc2.bias': no name") as caught:
        begun(WeightDecayRules({"haed": 0, "*.bias": 0, "fc2.bias": 1}), Net())
    assert len(caught) == 1


class Undecayed(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.rate)


def test_rules_that_multiply_nothing_are_warned_of():
    with pytest.warns(UserWarning, match=r"All groups have a weight decay of 0 under rules={'outlet': 2}"):
        begun(WeightDecayRules({"outlet": 2}), Undecayed())


class Returning(Net):
    """Optimizes by hand, with two optimizers."""

    def __init__(self, form):
        super().__init__()
        self.form, self.own, self.automatic_optimization = form, nn.Parameter(torch.zeros(2)), False

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.inlet.parameters(), self.rate, weight_decay=DECAY)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        self.second = torch.optim.SGD([self.own], self.rate, weight_decay=1)
        return self.form(self, optimizer)

    def training_step(self, batch, batch_idx):
        self.schedule.optimizer.step()
        self.schedule.step()


@pytest.mark.parametrize(
    "form",
    [
        lambda module, optimizer: optimizer,
        lambda module, optimizer: LightningOptimizer(optimizer),
        lambda module, optimizer: [optimizer],
        lambda module, optimizer: (optimizer, module.second),
        lambda module, optimizer: ([optimizer], [module.schedule]),
        lambda module, optimizer: ([optimizer, module.second], module.schedule),
        lambda module, optimizer: ([optimizer], [{"scheduler": module.schedule, "interval": "step"}]),
        lambda module, optimizer: {"optimizer": optimizer, "lr_scheduler": module.schedule, "monitor": "loss"},
        lambda module, optimizer: {"optimizer": optimizer, "lr_scheduler": {"scheduler": module.schedule}},
        lambda module, optimizer: (
            {"optimizer": optimizer, "lr_scheduler": {"scheduler": module.schedule}},
            {"optimizer": module.second},
        ),
    ],
)
def test_optimizers_and_schedulers_are_found_in_every_form(form):
    module = Returning(form)
    callback = WeightDecayRules({"*.bias": 0, "own": 3} if "second" in form.__code__.co_names else {"*.bias": 0})
    fit(module, loader(8, 4), callbacks=[callback])
    optimizer = module.schedule.optimizer
    assert [(g["weight_decay"], g["lr"]) for g in optimizer.param_groups] == [(DECAY, 0.005), (0, 0.005)]
    assert module.second.param_groups[0]["weight_decay"] == (3 if "own" in callback.rules else 1)


class Failing(Net):
    def training_step(self, batch, batch_idx):
        raise OSError("no step")


def test_hook_is_given_back_whatever_it_was(tmp_path):
    module = Net()
    steps(module, callbacks=[rules()])
    assert "configure_optimizers" not in vars(module)
    module.configure_optimizers = own = MethodType(Undecayed.configure_optimizers, module)
    with pytest.warns(UserWarning, match="weight decay of 0"):
        steps(module, callbacks=[rules()])
    assert vars(module)["configure_optimizers"] is own
    failing = Failing()
    with pytest.raises(OSError, match="no step"):
        steps(failing, callbacks=[rules()])
    assert "configure_optimizers" not in vars(failing)


def test_optimizer_that_every_fit_gets_is_multiplied_once():
    module = Net()
    configured = module.configure_optimizers()
    module.configure_optimizers = lambda: configured
    for _ in range(2):
        steps(module, callbacks=[rules()])
    decays = [group["weight_decay"] for group in configured["optimizer"].param_groups]
    assert decays == pytest.approx([DECAY, 0, DECAY / 2, DECAY * 2])
    with pytest.raises(ValueError, match="have been multiplied by the rules"):
        steps(module, callbacks=[WeightDecayRules({"outlet": 0})])


def test_one_callback_serves_several_fits():
    callback, trainers = rules(), []
    for _ in range(2):
        trainers.append(steps(Net(), callbacks=[callback]))
    torch.testing.assert_close(dict(weights(trainers[0])), dict(weights(trainers[1])), rtol=0, atol=0)
    callback.setup(trainers[0], module := Net(), "validate")
    assert "configure_optimizers" not in vars(module)


class Nothing(Net):
    def configure_optimizers(self):
        return None


def test_fits_that_rules_cannot_work_on_are_refused_before_a_step():
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `WeightDecayRules`"):
        trainer_of(callbacks=[rules(), WeightDecayRules({"outlet": 0})])
    with pytest.raises(ValueError, match="configure_optimizers has returned None, with no optimizer"):
        steps(Nothing(), callbacks=[rules()])
    callback, trainer = rules(), trainer_of()
    with pytest.raises(RuntimeError, match="SingleDeviceStrategy has not called configure_optimizers"):
        callback.on_train_start(trainer, Net())


def test_other_rules_go_on_with_what_was_saved_or_are_refused(tmp_path):
    path = tmp_path / "saved.ckpt"
    steps(Net(), callbacks=[rules()]).save_checkpoint(path)
    on = {"max_epochs": 2, "ckpt_path": path}
    more = WeightDecayRules({"*.bias": 0, "norm": 0.25, "outlet": 3})
    with pytest.warns(UserWarning, match="other weight decays than the rules came to"):
        trainer = steps(Net(), callbacks=[more], **on)
    assert [g["weight_decay"] for g in trainer.optimizers[0].param_groups] == pytest.approx([0.3, 0, 0.15, 0.6])
    way_out = "Resume with the rules that were saved, or load the weights alone"
    for others, message in (
        ({"*.bias": 0, "norm": 0.5, "inlet": 3}, r"has outlet.weight, inlet.weight \(2 in all\) in other groups than"),
        ({"*.bias": 0}, r"has outlet.weight, .* \(3 in all\) in other groups than rules={'\*.bias': 0} make"),
    ):
        trainer = trainer_of(callbacks=[WeightDecayRules(others)], max_epochs=2)
        with pytest.raises(ValueError, match=rf"{message}.*{way_out}"):
            trainer.fit(Net(), loader(12, 4), ckpt_path=path)
        assert not trainer.optimizers


def fully_sharded():
    """On a rank: groups of a module that FSDP has wrapped, and of one whose parameters it has joined."""
    parts = []
    for use_orig_params in (True, False):
        module = nn.Sequential(OrderedDict(first=nn.Linear(4, 4), norm=nn.LayerNorm(4)))
        parts.append(FSDP(module, device_id=torch.device("cpu"), use_orig_params=use_orig_params))
    optimizers = [torch.optim.SGD(part.parameters(), 0.1, weight_decay=1.0) for part in parts]
    callback = WeightDecayRules({"first.weight": 2, "LayerNorm": 0})
    callback.apply(optimizers[0], parts[0])
    with pytest.raises(ValueError, match=r"SGD holds .*flat_param, in which FSDP has joined.* use_orig_params=True"):
        callback.apply(optimizers[1], parts[1])
    return [[(len(g["params"]), g["weight_decay"]) for g in optimizer.param_groups] for optimizer in optimizers]


def test_wrappers_of_fsdp_do_not_count_and_joined_parameters_are_refused():
    assert run_ranks(2, fully_sharded) == [[[(1, 1), (1, 2), (2, 0)], [(1, 1)]]] * 2
