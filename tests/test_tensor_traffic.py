"""What a step communicates over the tensor axis, and what a block keeps, against the formulas."""

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from examples.gpt import GPT
from lightning_hybrid.callbacks import CommunicationLedger, MemoryLedger
from lightning_hybrid.functional.traffic import ring_bytes
from lightning_hybrid.parallel.ledgers.traffic import Traffic
from tests.launch import run_trainers
from tests.small import hybrid, trainer_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a .validation_step.")
SIZE, DEPTH, WIDTH, HEADS, LENGTH, SAMPLES, MICRO_BATCHES = 2, 2, 16, 4, 6, 8, 4
HIDDEN = SAMPLES // MICRO_BATCHES * LENGTH * WIDTH * 4  # bytes of one micro-batch's hidden states
BLOCKS = {"*.qkv": "fused_qkv", "*.out": "rowwise", "*.grow": "colwise", "*.shrink": "rowwise"}
WHOLE_ALL_REDUCE = ring_bytes("all_reduce", HIDDEN, SIZE)


class Plain(GPT):
    def __init__(self):
        super().__init__(width=WIDTH, depth=DEPTH, heads=HEADS, context=LENGTH)

    def loss(self, batch, name):
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class Head(LightningModule):
    """One linear layer over blocks that have no matrix."""

    def __init__(self, words):
        super().__init__()
        self.words = words
        self.embed, self.head = nn.Embedding(words, WIDTH), nn.Linear(WIDTH, words, bias=False)
        self.blocks = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(DEPTH))

    def training_step(self, batch, batch_idx):
        x = self.embed(batch[:, :-1] % self.words)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten() % self.words)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Llama(LightningModule):
    """Its queries, keys and values are layers of their own."""

    def __init__(self):
        super().__init__()
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256,
                hidden_size=WIDTH,
                intermediate_size=2 * WIDTH,
                num_hidden_layers=DEPTH,
                num_attention_heads=HEADS,
                num_key_value_heads=2,
            )
        )

    def training_step(self, batch, batch_idx):
        logits = self.model(input_ids=batch[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


LLAMA_BLOCKS = {
    **dict.fromkeys(("*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj"), "colwise"),
    **dict.fromkeys(("*.o_proj", "*.down_proj"), "rowwise"),
}


def counted(module, accumulate=1, **options):
    """The tensor axis in the last of two steps: by phase and collective, floats alone, and the deferred parameters."""
    ledger = CommunicationLedger()
    strategy = hybrid(1, 1, MICRO_BATCHES, tensor_parallel_size=SIZE, zero_stage=0, **options)
    trainer = trainer_of(strategy, callbacks=[ledger], accumulate_grad_batches=accumulate, log_every_n_steps=1)
    batches = torch.randint(256, (2 * accumulate, SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    trainer.fit(module, DataLoader(list(batches), batch_size=None))
    return {
        (row.phase, row.collective): traffic
        for row, traffic in ledger.last.items()
        if row.axis == "tensor" and row.dtype == "float32"
    }


def kept(mode, size=SIZE):
    """Bytes that the second block saves for the backward pass of a batch."""
    ledger = MemoryLedger()
    options = {"tensor_parallel_size": size, "tensor_parallel_plan": BLOCKS, "sequence_parallel": mode}
    strategy = hybrid(1, 1, 1, zero_stage=0, **options)
    batch = torch.randint(256, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    trainer_of(strategy, callbacks=[ledger]).fit(Plain(), DataLoader([batch], batch_size=None))
    return sum(number for name, number in ledger.last.activations.items() if f"{name}.".startswith("blocks.1."))


def counts():
    """What each setting communicates."""
    found = {
        "plain": counted(Plain(), tensor_parallel_plan=BLOCKS),
        "window": counted(Plain(), accumulate=3, tensor_parallel_plan=BLOCKS),
        "separate": counted(Llama(), tensor_parallel_plan=LLAMA_BLOCKS),
    }
    for mode in (True, "regather"):
        found[mode] = counted(Plain(), tensor_parallel_plan=BLOCKS, sequence_parallel=mode)
        found[mode, "window"] = counted(Plain(), 3, tensor_parallel_plan=BLOCKS, sequence_parallel=mode)
    for words in (64, 512):
        found[words] = counted(Head(words), tensor_parallel_plan={"head": "vocab"})
    found["kept"] = {mode: kept(mode) for mode in (False, True, "regather")}
    return found


@pytest.fixture(scope="module")
def traffic():
    first, second = run_trainers(SIZE, counts, timeout=240)
    assert first == second
    return first


@pytest.mark.parametrize(("case", "batches"), [("plain", 1), ("window", 3), ("separate", 1)])
def test_a_block_sums_twice_forward_and_twice_backward(traffic, case, batches):
    """Layers that read one input add their gradients before they are summed over the ranks."""
    calls = 2 * DEPTH * MICRO_BATCHES * batches
    expected = Traffic(calls, calls * HIDDEN, calls * WHOLE_ALL_REDUCE)
    assert traffic[case] == {("forward", "all_reduce"): expected, ("backward", "all_reduce"): expected}


def in_blocks(found, phase):
    """Gathers and reduce-scatters of blocks, without the two conversions at the ends of the stage."""
    ends = {"forward": (1, 0), "backward": (1, 0)}[phase]  # the way back to whole states, and from them
    gathers, scatters = found[phase, "all_gather"], found[phase, "reduce_scatter"]
    assert not any(name == "all_reduce" for at, name in found if at == phase)
    return gathers.calls - ends[0] * MICRO_BATCHES, scatters.calls - ends[1] * MICRO_BATCHES, gathers, scatters


def test_sequence_shards_are_gathered_and_scattered_with_the_bytes_of_the_sums(traffic):
    found, once = traffic[True], ring_bytes("all_gather", HIDDEN, SIZE)
    for phase in ("forward", "backward"):
        gathers, scatters, gathered, scattered = in_blocks(found, phase)
        assert gathers == scatters == 2 * DEPTH * MICRO_BATCHES
        assert scattered.wire == once * scattered.calls
        assert gathered.wire == once * gathered.calls
        in_all = once * (gathers + scatters)
        assert in_all == traffic["plain"][phase, "all_reduce"].wire


def test_gathering_again_costs_two_more_gathers_a_block(traffic):
    kept, again = traffic[True], traffic["regather"]
    assert again["forward", "all_gather"] == kept["forward", "all_gather"]
    assert again["forward", "reduce_scatter"] == kept["forward", "reduce_scatter"]
    assert again["backward", "reduce_scatter"] == kept["backward", "reduce_scatter"]
    more = again["backward", "all_gather"].calls - kept["backward", "all_gather"].calls
    assert more == 2 * DEPTH * MICRO_BATCHES


def deferred_bytes():
    """Norms of the blocks and biases of their row-wise layers."""
    block = Plain().blocks[0]
    read_on_shards = [*block.norm1.parameters(), *block.norm2.parameters(), block.shrink.bias]
    return DEPTH * sum(parameter.numel() * 4 for parameter in read_on_shards)


@pytest.mark.parametrize("mode", [True, "regather"])
def test_gradients_of_what_reads_shards_are_summed_once_a_window(traffic, mode):
    for found in (traffic[mode], traffic[mode, "window"]):
        assert found["step", "all_reduce"].payload == deferred_bytes()
    steps = traffic[mode]["step", "all_reduce"], traffic[mode, "window"]["step", "all_reduce"]
    assert steps[0] == steps[1]


def test_the_loss_communicates_three_numbers_a_token_whatever_the_vocabulary(traffic):
    assert traffic[64] == traffic[512]
    one = SAMPLES // MICRO_BATCHES * LENGTH * 4
    forward = sum(n.payload for (phase, _), n in traffic[512].items() if phase != "backward")
    assert forward == 3 * one * MICRO_BATCHES
    # backward only the head's input, whose gradient is a sum over the ranks
    assert traffic[512]["backward", "all_reduce"] == Traffic(
        MICRO_BATCHES, MICRO_BATCHES * HIDDEN, MICRO_BATCHES * WHOLE_ALL_REDUCE
    )


@pytest.mark.parametrize(("mode", "between", "inputs"), [(False, 2, 2), (True, 1, 2), ("regather", 1, 1)])
def test_a_block_keeps_its_share_of_what_one_process_keeps(traffic, mode, between, inputs):
    """Norms' inputs, the first matrices' inputs, and 12 hidden states' worth that is always split.

    Besides two numbers a token for each norm and one for each head. Source: Korthikanti et al. 2022, arXiv:2205.05198.
    """
    tokens = SAMPLES * LENGTH
    statistics = 4 * tokens / (SIZE if mode else 1) + tokens * HEADS / SIZE
    assert traffic["kept"][mode] == 4 * (tokens * WIDTH * (between + inputs + 12 / SIZE) + statistics)
