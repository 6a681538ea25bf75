"""Two language models with attention as people write it by hand."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class OwnAttention(nn.Module):
    """`nn.MultiheadAttention`, every second one with the sequence first."""

    def __init__(self, width: int, heads: int, batch_first: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=batch_first)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, causal: Tensor) -> Tensor:
        y = self.norm1(x)
        if not self.attention.batch_first:
            y = y.transpose(0, 1)
        y, _ = self.attention(y, y, y, attn_mask=causal, need_weights=False)
        x = x + (y if self.attention.batch_first else y.transpose(0, 1))
        return x + self.shrink(F.gelu(self.grow(self.norm2(x))))


class Attentive(nn.Module):
    """Embeddings, those blocks, a norm and a head."""

    def __init__(self, words: int, width: int, depth: int, heads: int, length: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(words, width), nn.Parameter(torch.randn(length, width) / 10)
        self.blocks = nn.ModuleList(OwnAttention(width, heads, batch_first=i % 2 == 0) for i in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text) + self.position[: text.shape[1]]
        causal = torch.ones(text.shape[1], text.shape[1], dtype=torch.bool, device=x.device).triu(1)
        for block in self.blocks:
            x = block(x, causal)
        return self.head(self.norm(x))


class FusedAttention(nn.Module):
    """One layer makes queries, keys and values, with biases, and sizes are read from the input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_head, self.n_embd = heads, width

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (y.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class FusedBlock(nn.Module):
    """Pre-norm attention and perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), FusedAttention(width, heads), nn.LayerNorm(width)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class Fused(nn.Module):
    """Those blocks in a dictionary, and a head that shares the embedding's weights."""

    def __init__(self, words: int, width: int, depth: int, heads: int, length: int) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(words, width),
                "wpe": nn.Embedding(length, width),
                "h": nn.ModuleList(FusedBlock(width, heads) for _ in range(depth)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, words, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight
        nn.init.normal_(self.lm_head.weight, std=0.1)
        for bias in (parameter for name, parameter in self.named_parameters() if name.endswith("bias")):
            nn.init.normal_(bias, std=0.1)

    def forward(self, text: Tensor) -> Tensor:
        position = torch.arange(text.shape[1], device=text.device)
        x = self.transformer["wte"](text) + self.transformer["wpe"](position)
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))
