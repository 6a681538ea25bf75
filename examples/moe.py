"""Experts instead of perceptrons, beside a dense model of the same active size: `python -m examples.moe`.

Both train on the text of Python's own standard library for the same steps, from three seeds each, over four processes
on the CPU that share out the data; the experts are split over pairs of them. What is printed is what was measured,
whichever model is better. `--help` lists the options; `--picture FOLDER` draws how evenly the experts were used.
"""

import argparse
from pathlib import Path

from lightning.pytorch import Trainer, seed_everything
from torch import Tensor, nn

from examples.gpt import GPT, Block, StandardLibrary
from lightning_hybrid import HybridPTDPStrategy
from lightning_hybrid.callbacks import ExpertMonitor
from lightning_hybrid.experts import MoELayer


class MoEBlock(Block):
    """A block whose perceptron is a mixture: a byte passes `top_k` experts that have as many units together.

    Args:
        width: As for `Block`.
        heads: As for `Block`.
        num_experts: Number of experts.
        top_k: Of them for each byte.
    """

    def __init__(self, width: int, heads: int, num_experts: int, top_k: int) -> None:
        super().__init__(width, heads)
        del self.grow, self.shrink
        self.moe = MoELayer(width, 4 * width // top_k, num_experts, top_k=top_k, bias=True)
        nn.init.normal_(self.moe.experts.down, std=0.005)

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.moe(x)


class MoEGPT(GPT):
    """The byte-level GPT with experts in every block.

    Args:
        num_experts: Of each block.
        top_k: Of them for each byte.
        sizes: As for `GPT`.
    """

    def __init__(self, num_experts: int = 8, top_k: int = 2, **sizes: float) -> None:
        super().__init__(**sizes)
        width, heads = self.hparams["width"], self.hparams["heads"]
        self.blocks = nn.ModuleList(MoEBlock(width, heads, num_experts, top_k) for _ in self.blocks)
        self.top_share = top_k / num_experts


def active_size(model: GPT) -> int:
    """Count the parameters that a byte passes."""
    share = getattr(model, "top_share", 1.0)
    sizes = ((p.numel(), share if ".experts." in name else 1.0) for name, p in model.named_parameters())
    return round(sum(number * part for number, part in sizes))


def held_out_bits(model: GPT, data: StandardLibrary, devices: int, steps: int, picture: str | None) -> float:
    """Train, and give the bits that a held-out byte takes in the end."""
    is_mixture, is_even = isinstance(model, MoEGPT), devices % 2 == 0
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=HybridPTDPStrategy(1, expert_parallel_size=2 if is_mixture and is_even else 1),
        callbacks=[ExpertMonitor(picture=picture or False, each_expert=False)] if is_mixture else [],
        max_steps=steps,
        val_check_interval=steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data.train_dataloader(), data.val_dataloader())
    return float(trainer.callback_metrics["val/bits_per_byte"])


def main(
    devices: int = 4, steps: int = 300, num_seeds: int = 3, picture: str | None = None, **sizes: float
) -> list[tuple[float, float]]:
    """Compare.

    Returns:
        Of each seed, the held-out bits per byte of the mixture and of the dense model.
    """
    learning_rate = 1e-2  # better for both than 2e-3 and 5e-3
    sizes = {"width": 64, "depth": 4, "context": 64, "learning_rate": learning_rate, **sizes}
    data = StandardLibrary(batch_size=64 // devices, context=int(sizes["context"]))
    data.setup("fit")
    rows = []
    for seed in range(num_seeds):
        bits = []
        for kind in (MoEGPT, GPT):
            seed_everything(seed, verbose=False)
            model = kind(**sizes)
            size, active = sum(p.numel() for p in model.parameters()), active_size(model)
            folder = str(Path(picture, f"seed-{seed}")) if picture else None
            bits.append(held_out_bits(model, data, devices, steps, folder))
            rank_zero_print(
                model,
                f"seed {seed}, {kind.__name__:>6}: {bits[-1]:.4f} held-out bits per byte,"
                f" {active:,} of {size:,} parameters active",
            )
        rows.append((bits[0], bits[1]))
    rank_zero_print(model, summary(rows))
    return rows


def rank_zero_print(model: GPT, text: str) -> None:
    if model.trainer.is_global_zero:
        print(text, flush=True)


def summary(rows: list[tuple[float, float]]) -> str:
    mixture, dense = (sum(column) / len(rows) for column in zip(*rows, strict=True))
    better = sum(a < b for a, b in rows)
    return f"mean: mixture {mixture:.4f}, dense {dense:.4f}; the mixture is better from {better} of {len(rows)} seeds"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=4, help="processes (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="of each training (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, dest="num_seeds", help="(default: %(default)s)")
    parser.add_argument("--picture", metavar="FOLDER", help="draw the load of each expert")
    main(**vars(parser.parse_args()))
