"""Checkpoints of models with experts: any number of ranks that share them out goes on from any other."""

import torch.distributed as dist
from lightning.pytorch import Callback
from torch import nn
from torch.testing import assert_close

from lightning_hybrid.experts import LossFree, MoELayer
from tests.launch import run_trainers
from tests.small import WIDTH, hybrid, trainer_of, weights
from tests.test_expert_parity import CLIP, NUM_EXPERTS, Mixture, Mixtures, data, loader

BATCHES, BATCH, WINDOW, LAST = 6, 8, 2, 2  # saved behind the third batch, within a window
LAYOUTS = {
    4: [
        {"pipeline": 1, "expert_parallel_size": 2, "zero_stage": 3},
        {"pipeline": 1, "expert_parallel_size": 4, "zero_stage": 0},
        {"pipeline": 2, "expert_parallel_size": 2, "zero_stage": 1},
        {"pipeline": 1, "expert_parallel_size": 2, "zero_stage": 2, "replicate_size": 2},
    ],
    2: [
        {"pipeline": 1, "expert_parallel_size": 2, "zero_stage": 1},
        {"pipeline": 1, "expert_parallel_size": 2, "zero_stage": 2, "cpu_offload": True},
        {"pipeline": 1, "zero_stage": 3},
    ],
    1: [{"pipeline": 1}],
}
ALL = [(size, index) for size, layouts in LAYOUTS.items() for index in range(len(layouts))]


class Saves(Callback):
    """Keeps the losses, and saves once."""

    def __init__(self, path=None):
        self.seen, self.path = [], path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(float(outputs["loss"]))
        if batch_idx == LAST and self.path is not None:
            trainer.save_checkpoint(self.path)


class Counted(Mixtures):
    """Its first layer counts over windows, and the router of its second moves a bias behind each."""

    block, depth = None, 0

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Mixture(), Mixture()]).double()
        self.blocks[0].mixture = MoELayer(WIDTH, 5, NUM_EXPERTS, balance_loss=0.3, balance_over="global").double()
        self.blocks[1].mixture = MoELayer(WIDTH, 5, NUM_EXPERTS, LossFree(WIDTH, NUM_EXPERTS, speed=0.1)).double()


def train(layout, form, path=None, resume=None, module=Mixtures):
    data_size = dist.get_world_size() // layout["pipeline"]
    saves = Saves(path)
    strategy = hybrid(**{"microbatches": layout["pipeline"], **layout}, state_dict_type=form)
    trainer = trainer_of(strategy, accumulate_grad_batches=WINDOW, callbacks=[saves], gradient_clip_val=CLIP)
    batches = loader(data(BATCHES * BATCH), dist.get_rank() % data_size, data_size, BATCH)
    trainer.fit(module(), batches, ckpt_path=resume)
    return saves.seen, dict(weights(trainer)), trainer.strategy.optimizer_state(trainer.optimizers[0]).get("state")


def save_all(folder):
    size = dist.get_world_size()
    return [
        train(layout, ("sharded", "full")[index % 2], folder / f"{size}-{index}.ckpt")
        for index, layout in enumerate(LAYOUTS[size])
    ]


def go_on(folder, tasks):
    size = dist.get_world_size()
    return [train(LAYOUTS[size][index], "full", resume=folder / f"{s}-{i}.ckpt") for index, (s, i) in tasks]


def test_any_share_of_the_experts_goes_on_from_any_other(tmp_path):
    saved = {size: run_trainers(size, save_all, tmp_path, timeout=300) for size in LAYOUTS}
    losses, state, moments = saved[1][0][0]
    close = {"rtol": 1e-9, "atol": 1e-12}
    for size, index in ALL:
        about = {"msg": lambda text, at=LAYOUTS[size][index]: f"{at}: {text}"}
        assert_close(saved[size][0][index], (losses, state, moments), **close, **about)
    for size, layouts in LAYOUTS.items():
        each = 1 if size > 1 else len(ALL)  # that is all of them, for one process goes on from any
        tasks = [(i, ALL[(3 * i + 3 + j + size) % len(ALL)]) for i in range(len(layouts)) for j in range(each)]
        outcomes = run_trainers(size, go_on, tmp_path, tasks, timeout=300)
        for (index, (s, i)), found in zip(tasks, outcomes[0], strict=True):
            about = {"msg": lambda t, a=LAYOUTS[size][index], b=LAYOUTS[s][i]: f"{a} from {b}: {t}"}
            assert_close(found, (losses[LAST + 1 :], state, moments), **close, **about)


COUNTED = {2: [{"pipeline": 1, "expert_parallel_size": 2}, {"pipeline": 2, "microbatches": 1}], 1: [{"pipeline": 1}]}


def count_and_go_on(folder, sources):
    """Save within a window under each layout of this size; then go on under each from all that has been saved."""
    size, found = dist.get_world_size(), []
    for index, layout in enumerate(COUNTED[size]):
        found.append(train(layout, "sharded", folder / f"{size}-{index}.ckpt", module=Counted))
    return [*found, *(train(at, "full", resume=path, module=Counted) for at in COUNTED[size] for path in sources)]


def test_counts_of_a_window_go_on_under_any_layout(tmp_path):
    """Those of a loss over the window, and of a bias that moves at its end."""
    ones = run_trainers(1, count_and_go_on, tmp_path, [])[0]
    sources = [tmp_path / "1-0.ckpt"]
    twos = run_trainers(2, count_and_go_on, tmp_path, [*sources, tmp_path / "2-0.ckpt", tmp_path / "2-1.ckpt"])[0]
    (losses, state, moments), close = ones[0], {"rtol": 1e-9, "atol": 1e-12}
    for whole in twos[:2]:
        assert_close(whole, (losses, state, moments), **close)
    for rest in twos[2:]:
        assert_close(rest, (losses[LAST + 1 :], state, moments), **close)
