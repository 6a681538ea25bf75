"""Mixtures of transformers, unmodified, with their experts split: every layout gives the numbers of one process."""

from contextlib import nullcontext
from copy import deepcopy
from functools import cache
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import (
    AriaTextConfig,
    AutoModelForCausalLM,
    DbrxConfig,
    GptOssConfig,
    JetMoeConfig,
    MixtralConfig,
    NemotronHConfig,
    OlmoeConfig,
    SwitchTransformersConfig,
)
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.dbrx.modeling_dbrx import DbrxExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.jetmoe.modeling_jetmoe import JetMoeMoE
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralSparseMoeBlock
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

from lightning_hybrid import HybridPTDPStrategy
from lightning_hybrid.parallel.experts.exchange import TokenExchange
from lightning_hybrid.parallel.experts.parallel import banks_of, check_banks
from lightning_hybrid.parallel.experts.published import adopt_published, unknown_experts
from tests.launch import run_ranks, run_trainers
from tests.small import Small, check_refused, trainer_of

WORDS, LENGTH, SAMPLES, STEPS = 24, 5, 8, 3
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS = {
    "mixtral": lambda **options: MixtralConfig(num_local_experts=4, **SIZES | options),
    "olmoe": lambda **options: OlmoeConfig(num_experts=4, norm_topk_prob=True, **SIZES | options),
}
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


class Language(LightningModule):
    """Next words, with the loss in float64: transformers computes it in float32."""

    def __init__(self, kind, **options):
        super().__init__()
        torch.manual_seed(3)
        config = CONFIGS[kind](initializer_range=0.3, **options)
        self.model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").double()

    def loss(self, words):
        outputs = self.model(input_ids=words, use_cache=False)
        loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())
        balance = getattr(outputs, "aux_loss", None)
        return loss if balance is None else loss + self.model.config.router_aux_loss_coef * balance

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch[0])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch[0]), batch_size=len(batch[0]))

    def configure_optimizers(self):
        experts = [p for name, p in self.named_parameters() if "experts" in name]
        rest = [p for name, p in self.named_parameters() if "experts" not in name]
        groups = [{"params": rest, "lr": 0.02}, {"params": experts, "lr": 0.01, "weight_decay": 0.1}]
        return torch.optim.AdamW(groups, eps=1e-3)


class Row(NamedTuple):
    """A layout: sizes of the axes, and what else is asked for."""

    kind: str
    data: int
    expert: int
    tensor: int = 1
    pipeline: int = 1
    zero: int = 0
    accumulate: int = 1
    balanced: bool = False
    checkpointed: bool = False
    sizes: tuple[int, ...] = ()

    @property
    def size(self):
        return self.data * self.tensor * self.pipeline

    def strategy(self):
        return HybridPTDPStrategy(
            pipeline_parallel_size=self.pipeline,
            tensor_parallel_size=self.tensor,
            expert_parallel_size=self.expert,
            zero_stage=self.zero,
            num_microbatches=2 if self.pipeline > 1 else 1,
        )


ROWS = {
    2: [
        *(Row("mixtral", 2, 2, zero=zero, accumulate=1 + zero % 2) for zero in range(4)),
        Row("olmoe", 2, 2, zero=3),
        Row("mixtral", 2, 2, balanced=True),
        Row("mixtral", 2, 2, zero=3, sizes=(7, 3, 2)),
    ],
    4: [
        Row("olmoe", 4, 2, zero=1, accumulate=2),
        Row("mixtral", 4, 2, zero=3),
        *(Row("mixtral", 2, 2, pipeline=2, zero=zero, checkpointed=zero > 0) for zero in (0, 3)),
        Row("mixtral", 2, 2, tensor=2),
    ],
}
FULL = {
    2: [Row("olmoe", 2, 2), Row("mixtral", 2, 2, sizes=(7, 3, 2)), Row("olmoe", 1, 1, pipeline=2)],
    4: [
        *(Row("olmoe", 4, 2, zero=zero, accumulate=2) for zero in (0, 2, 3)),
        *(Row("mixtral", 4, 4, zero=zero) for zero in (0, 1, 2)),
        Row("olmoe", 2, 2, pipeline=2, zero=2),
        *(Row("mixtral", 2, expert, tensor=2, zero=2) for expert in (1, 2)),
    ],
}


def words(number):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randint(WORDS, (number, LENGTH), generator=generator))


def loader(samples, rank=0, replicas=1, each=SAMPLES):
    sampler = DistributedSampler(samples, replicas, rank, shuffle=False)
    return DataLoader(samples, each // replicas, sampler=sampler)


def uneven(sizes, rank=0, replicas=1):
    """Batches cut into parts that differ by one, the last maybe empty."""
    batches = words(sum(sizes)).tensors[0].split(sizes)
    return DataLoader([[batch.tensor_split(replicas)[rank]] for batch in batches], batch_size=None)


def observed(row, strategy, rank=0, replicas=1, devices=1, path=None):
    """Losses of the last batch and of a validation with a partial batch, weights and states after clipped steps."""
    module = Language(row.kind, **(BALANCED if row.balanced else {}))
    keys, shapes = list(module.state_dict()), {name: p.shape for name, p in module.named_parameters()}
    if row.checkpointed:
        module.model.activation_checkpointing_enable()
    options = {"accumulate_grad_batches": row.accumulate, "gradient_clip_val": 0.5, "use_distributed_sampler": False}
    trainer = trainer_of(strategy=strategy, devices=devices, **options)
    train = loader(words(SAMPLES * STEPS * row.accumulate), rank, replicas)
    val = loader(words(SAMPLES + 2), rank, replicas)
    trainer.fit(module, uneven(row.sizes, rank, replicas) if row.sizes else train, val)
    if row.expert > 1 and row.zero == 0 and row.pipeline == 1:
        check_split(module, shapes, row.expert)
    weights = trainer.strategy.lightning_module_state_dict()
    assert not weights or list(weights) == keys
    if path is not None:
        trainer.save_checkpoint(path)
    losses = {name: trainer.callback_metrics[name] for name in ("loss", "val")}
    return losses, weights, trainer.strategy.optimizer_state(trainer.optimizers[0])


def check_split(module, shapes, size):
    experts = {name: p for name, p in module.named_parameters() if "experts" in name}
    assert len(experts) == 2 * SIZES["num_hidden_layers"]
    assert all(p.shape == (shapes[name][0] // size, *shapes[name][1:]) for name, p in experts.items())
    assert type(module.model.model.layers[0].mlp.experts).__name__ in ("MixtralExperts", "OlmoeExperts")


def fit_rows(rows, path):
    outcomes = []
    for row in rows:
        rank = dist.get_rank() // row.tensor % row.data
        outcomes.append(observed(row, row.strategy(), rank, row.data, row.size, path if row is rows[0] else None))
    return outcomes


@cache
def expected(kind, accumulate, sizes):
    return observed(Row(kind, 1, 1, accumulate=accumulate, sizes=sizes), "auto")


@pytest.mark.parametrize(
    "rows", [*ROWS.values(), *(pytest.param(rows, marks=pytest.mark.full) for rows in FULL.values())]
)
def test_every_layout_gives_the_numbers_of_one_process(rows, tmp_path):
    size = rows[0].size
    outcomes = run_trainers(size, fit_rows, rows, tmp_path / "expert.ckpt", timeout=300)
    for index, row in enumerate(rows):
        losses, weights, state = outcomes[0][index]
        wanted_losses, wanted, wanted_state = (
            in_halves() if row.balanced else expected(row.kind, row.accumulate, row.sizes)
        )
        close = {"rtol": 1e-9, "atol": 1e-12, "msg": lambda text, row=row: f"{row}: {text}"}
        if not row.balanced:
            assert_close(losses, wanted_losses, **close)
        assert_close(dict(weights), dict(wanted), **close)
        assert_close(state["state"], wanted_state["state"], **close)
    check_goes_on_in_one_process(rows[0], tmp_path / "expert.ckpt")


@cache
def in_halves():
    """One process that sees as one micro-batch what a replica of two sees: the model's balance loss is of that."""
    module = Language("mixtral", **BALANCED)
    trainer = trainer_of(accumulate_grad_batches=2, gradient_clip_val=0.5, limit_val_batches=0)
    order = torch.arange(SAMPLES * STEPS).view(STEPS, -1, 2).transpose(1, 2).flatten()
    trainer.fit(module, DataLoader(words(len(order)), SAMPLES // 2, sampler=order.tolist()), [])
    return None, module.state_dict(), trainer.optimizers[0].state_dict()


def check_goes_on_in_one_process(row, path):
    """A second epoch from the checkpoint is as one of two epochs without it."""
    train, ends = loader(words(SAMPLES * STEPS * row.accumulate)), []
    for begin in (None, path):
        module = Language(row.kind)
        options = {"accumulate_grad_batches": row.accumulate, "gradient_clip_val": 0.5, "limit_val_batches": 0}
        trainer = trainer_of(max_epochs=2, **options)
        trainer.fit(module, train, [], ckpt_path=begin)
        assert trainer.global_step == 2 * STEPS
        ends.append(module.state_dict())
    assert_close(*ends, rtol=1e-9, atol=1e-12)


FAMILIES = {
    "mixtral": (MixtralExperts, MixtralConfig(num_local_experts=4, **SIZES)),
    "gpt_oss": (GptOssExperts, GptOssConfig(num_local_experts=4, **SIZES)),  # transposed, with biases, interleaved
    "aria": (AriaExperts, AriaTextConfig(moe_num_experts=4, **SIZES)),  # transposed
    "nemotron_h": (NemotronHExperts, NemotronHConfig(n_routed_experts=4, moe_intermediate_size=12, hidden_size=16)),
}
PAST = 4  # no expert has this number


def routing(case, rank):
    """Numbers of the experts of each token."""
    chosen = torch.rand(6, 4).topk(2).indices
    return {
        "random": chosen,
        "all to the first": torch.tensor([[0, 1]]).expand(6, 2),
        "no tokens on one rank": chosen[: 6 * rank],
        "some to no expert": torch.where(torch.rand(6, 2) < 0.5, PAST, chosen),
    }[case]


def through(experts, x, index, weights, cotangent):
    """Outputs, and gradients of tokens, weights and parameters."""
    inputs = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
    outputs = checkpoint(experts, inputs[0], index, inputs[1], use_reentrant=False)
    if outputs.requires_grad:  # all experts in one process leave no gradients where there are no tokens
        (outputs * cotangent).sum().backward()
    return [outputs.detach(), *(tensor.grad for tensor in [*inputs, *experts.parameters()])]


def compare(kind, implementation, case, dtype):
    """What the experts of two ranks and all of them on this one make of the same tokens."""
    experts_class, config = FAMILIES[kind]
    config, rank = deepcopy(config), dist.get_rank()
    config._experts_implementation = implementation
    torch.manual_seed(0)
    whole = experts_class(config)
    for parameter in whole.parameters():
        nn.init.normal_(parameter)
    layer = nn.ModuleDict({"experts": deepcopy(whole.to(dtype))})
    adopt_published(layer)
    for parameter in layer.parameters():
        parameter.data = parameter.data.chunk(2)[rank].clone()
    layer["experts"].exchange = TokenExchange(dist.group.WORLD)
    torch.manual_seed(1 + rank)
    index = routing(case, rank)
    x, cotangent = torch.randn(2, len(index), 16, dtype=dtype)
    given = x, index, torch.rand(index.shape, dtype=dtype), cotangent
    found, wanted = through(layer["experts"], *given), through(whole, *given)
    likes = [x, x, given[2], *whole.parameters()]
    wanted = [torch.zeros_like(like) if value is None else value for value, like in zip(wanted, likes, strict=True)]
    for total in wanted[3:]:
        dist.all_reduce(total)
    return found, [*wanted[:3], *(total.chunk(2)[rank] for total in wanted[3:])]


def compare_all(cases):
    return [compare(*case) for case in cases]


def test_experts_of_every_make_give_their_own_numbers_wherever_they_are():
    cases = [
        (kind, implementation, case, torch.float64)
        for kind in FAMILIES
        for implementation in ("eager", "batched_mm")
        for case in ("random", "all to the first", "no tokens on one rank")
    ]
    cases += [(kind, "grouped_mm", "all to the first", torch.float32) for kind in ("mixtral", "gpt_oss")]
    cases.append(("mixtral", "eager", "some to no expert", torch.float64))
    for outcomes in run_ranks(2, compare_all, cases):
        for case, (found, wanted) in zip(cases, outcomes, strict=True):
            close = {"rtol": 1e-9, "atol": 1e-12} if case[-1] is torch.float64 else {}  # else other kernels' rounding
            assert_close(found, wanted, **close, msg=lambda text, case=case: f"{case}: {text}")


class Listed(nn.Module):
    """A block that loops over modules."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 4), nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        return x + sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class ListedModel(Small):
    block, depth = Listed, 2


UNKNOWN = {
    r"the model has none.* experts \(ModuleList\) has 4 experts as modules of their own": Listed,
    r"experts \(SwitchTransformersExperts\) has 4 experts as modules": lambda: SwitchTransformersSparseMLP(
        SwitchTransformersConfig(num_experts=4, d_model=8, d_ff=8)
    ),
    r"\(JetMoeParallelExperts\) has num_experts=4 and forward\(inputs, expert_size\)": lambda: JetMoeMoE(
        JetMoeConfig(num_local_experts=4, hidden_size=8, intermediate_size=8)
    ),
    r"Nothing in it looks like experts\. Leave expert_parallel_size 1": lambda: nn.Linear(2, 2),
    r"experts \(DbrxExperts\) cannot be split: mlp\.w1 is \[24, 2048\], .*num_experts=4": lambda: nn.ModuleDict(
        {"experts": DbrxExperts(DbrxConfig(ffn_config={"moe_num_experts": 4, "ffn_hidden_size": 6}).ffn_config)}
    ),
}


@pytest.mark.parametrize("pattern", UNKNOWN)
def test_experts_that_cannot_be_split_are_refused_by_name(pattern):
    model = UNKNOWN[pattern]()
    with pytest.raises(ValueError, match=pattern):
        split(model, 2)


def split(model, size):
    adopt_published(model)
    check_banks(banks_of(model), size, unknown_experts(model))


def test_a_number_of_ranks_must_divide_that_of_the_experts():
    with pytest.raises(ValueError, match="expert_parallel_size=3 does not divide the 4 experts of experts"):
        split(MixtralSparseMoeBlock(FAMILIES["mixtral"][1]), 3)


def test_a_layer_whose_forward_was_replaced_is_refused():
    layer = MixtralSparseMoeBlock(FAMILIES["mixtral"][1])
    layer.forward = layer.forward
    with pytest.raises(ValueError, match="the layer around it, was replaced"):
        split(layer, 2)


def test_listed_experts_are_refused_before_training():
    check_refused({ListedModel: r"blocks\.0\.experts \(ModuleList\) has 4 experts"}, pipeline=1, expert_parallel_size=2)


class Factored(Language):
    def configure_optimizers(self):
        return torch.optim.Adafactor(self.parameters())


def refused():
    said, train = [], loader(words(SAMPLES))
    split = Language("mixtral")
    for module, error in ((Factored("mixtral"), ValueError), (split, None), (split, RuntimeError)):
        trainer = trainer_of(Row("mixtral", 2, 2).strategy(), devices=2, max_steps=1)
        with pytest.raises(error) if error else nullcontext() as caught:
            trainer.fit(module, train, train)
        said.append(str(caught.value) if caught else "")
    return said


def test_optimizers_of_whole_parameters_and_second_trainers_are_refused():
    for whole, first, second in run_trainers(2, refused):
        assert "Adafactor looks at whole parameters, and with expert_parallel_size=2 it would see slices" in whole
        assert not first
        assert "was cut, split or sharded by another Trainer" in second


def test_router_logits_that_other_stages_have_are_refused():
    for message in run_trainers(2, balanced_over_stages):
        assert "is asked for output_router_logits" in message


def balanced_over_stages():
    module, train = Language("mixtral", **BALANCED), loader(words(SAMPLES))
    trainer = trainer_of(Row("mixtral", 1, 1, pipeline=2).strategy(), devices=2)
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(module, train, train)
    return str(caught.value)
