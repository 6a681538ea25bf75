"""Models to plan for, and plans in a form that is quick to read."""

from torch import nn

from lightning_hybrid.parallel.pipeline.blocks import block_names, find_block_lists
from lightning_hybrid.parallel.tensor.plan import make_plan

WIDTH, WIDE, HEADS, WORDS = 16, 32, 4, 24


class Root(nn.Module):
    """What a user's LightningModule is to the planner: a module with a model somewhere in it."""

    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def stack(block, depth=2, **around):
    """A model of `depth` blocks."""
    return Root(**around, layers=nn.ModuleList(block() for _ in range(depth)))


def blocks_of(root):
    return block_names(root, find_block_lists(root))


def plan(root, size=2, given="auto", *, sequence_parallel=False):
    return make_plan(root, blocks_of(root), size, given, sequence_parallel=sequence_parallel)


def styles(root, size=2, given="auto", *, sequence_parallel=False):
    """Style by name, of the first block alone, without its name, and of all modules outside the blocks."""
    blocks = blocks_of(root)
    found = {}
    for assignment in plan(root, size, given, sequence_parallel=sequence_parallel):
        block = next((block for block in blocks if f"{assignment.module}.".startswith(f"{block}.")), None)
        if block is None or block == blocks[0]:
            found[assignment.module.removeprefix(f"{block}.")] = assignment.style
    return found


def at(assignments, name):
    """The assignment of the one module whose name ends so."""
    (found,) = [each for each in assignments if f".{each.module}".endswith(f".{name}")]
    return found


class FusedBlock(nn.Module):
    """As in nanoGPT: attention and MLP modules, query, key and value in one layer, biases everywhere."""

    def __init__(self, width=WIDTH, heads=HEADS, names=("c_attn", "c_proj")):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Root(**{names[0]: nn.Linear(width, 3 * width), names[1]: nn.Linear(width, width)})
        self.attn.n_head = heads
        self.mlp = Root(c_fc=nn.Linear(width, 4 * width), gelu=nn.GELU(), c_proj=nn.Linear(4 * width, width))


class SeparateBlock(nn.Module):
    """As in minGPT: query, key and value apart, a Sequential for the MLP."""

    def __init__(self, width=WIDTH, heads=HEADS, names=("key", "query", "value", "proj")):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Root(**{name: nn.Linear(width, width) for name in names})
        self.attn.n_head = heads
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))


class SwiGLUBlock(nn.Module):
    """An MLP alone, in Meta's order of registration: gate, down, up."""

    def __init__(self, width=WIDTH, wide=WIDE):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.feed_forward = Root(w1=nn.Linear(width, wide), w2=nn.Linear(wide, width), w3=nn.Linear(width, wide))


class GroupedBlock(nn.Module):
    """Grouped-query attention written flat in the block, with norms on heads."""

    def __init__(self, heads=4, kv_heads=2, head_dim=4):
        super().__init__()
        self.num_heads = heads
        self.norm = nn.RMSNorm(WIDTH)
        self.wq = nn.Linear(WIDTH, heads * head_dim, bias=False)
        self.wk = nn.Linear(WIDTH, kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(WIDTH, kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(heads * head_dim, WIDTH)
        self.q_norm, self.k_norm = nn.RMSNorm(head_dim), nn.RMSNorm(head_dim)


def encoder_layer(**keywords):
    return nn.TransformerEncoderLayer(WIDTH, HEADS, WIDE, batch_first=True, **keywords)
