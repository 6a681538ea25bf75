"""Draws the pictures of the pages of callbacks and metrics: `python docs/pictures/draw.py NAME`, all without a name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

PICTURES = Path(__file__).parent


def plain(rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    """An empty picture of the usual size, and its axes."""
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    return figure, figure.subplots(rows, columns)


def save(figure: Figure, name: str) -> None:
    """Write a picture beside this file."""
    figure.savefig(PICTURES / f"{name}.png", dpi=120)


def trained_digits(batch_size: int, rate: float) -> tuple[Any, Any]:
    """The network of `examples/digits.py` after 30 epochs of momentum SGD, and its loss on what it was trained on."""
    sys.path.append(str(PICTURES.parents[1]))  # for the examples
    import torch
    import torch.nn.functional as F

    from examples.digits import DigitsNet, Shuffled, parts

    torch.manual_seed(0)
    net, train = DigitsNet(batch_size=batch_size), parts()["train"]
    order = torch.tensor(list(Shuffled(len(train), 30, seed=0)))
    optimizer = torch.optim.SGD(net.parameters(), rate, momentum=0.9)
    for chosen in order.split(batch_size):
        optimizer.zero_grad()
        F.cross_entropy(net(train.images[chosen]), train.classes[chosen]).backward()
        optimizer.step()
    return net.eval(), lambda: F.cross_entropy(net(train.images), train.classes)


DIGITS = {"batches of 32": (32, 0.02), "batches of 1,280": (1280, 0.2)}


def draw_sharpness() -> None:
    """The loss of two minima on the way to the worst corner of the box, and away from it."""
    import torch

    from lightning_hybrid.functional.ascent import ascend, box_of, sharpness
    from lightning_hybrid.parallel.loss_surface import LossSurface, Term

    figure, axes = plain()
    along = torch.linspace(-1, 1, 41).tolist()
    for (label, settings), color in zip(DIGITS.items(), ("tab:blue", "tab:red"), strict=True):
        net, loss = trained_digits(*settings)
        surface = LossSurface(net, [Term(loss, (), 1.0)], None)
        with surface.open():
            found = ascend(surface.loss, surface.gradient, box_of(surface.parameters, 1e-3), steps=10)
            losses = [surface.loss([t * part for part in found.offset]) for t in along]
        value = sharpness(found.losses[0], found.losses[-1])
        axes.plot(along, losses, color=color, label=f"{label}: sharpness {value:.3g}")
    axes.set(xlabel="part of the way to the highest point that was found in the box", ylabel="loss in training")
    axes.legend()
    save(figure, "sharpness")


def draw_hessian_top_eigenvalue() -> None:
    """Rayleigh quotients of power iteration at two minima."""
    from functools import partial

    from lightning_hybrid.functional.power_iteration import largest_eigenvalue
    from lightning_hybrid.metrics import HessianTopEigenvalue
    from lightning_hybrid.parallel.loss_surface import LossSurface, Term

    figure, axes = plain()
    for (label, settings), color in zip(DIGITS.items(), ("tab:blue", "tab:red"), strict=True):
        net, loss = trained_digits(*settings)
        surface, quotients = LossSurface(net, [Term(loss, (), 1.0)], None), list[float]()

        def product(vector: list[Any], surface: Any = surface, quotients: list[float] = quotients) -> list[Any]:
            image = surface.product(vector)
            quotients.append(float(sum((a * b).sum() for a, b in zip(vector, image, strict=True))))
            return list(image)

        start = partial(HessianTopEigenvalue().start, surface.parameters)
        with surface.open():
            found = largest_eigenvalue(product, start, iterations=60, tolerance=1e-4)
        bound = f"$\\pm$ {found.residual:.1g}"
        axes.plot(
            range(1, len(quotients) + 1), quotients, ".-", color=color, label=f"{label}: {found.value:.4g} {bound}"
        )
    axes.set(xlabel="Hessian-vector products", ylabel="Rayleigh quotient", yscale="symlog")
    axes.legend()
    save(figure, "hessian_top_eigenvalue")


if __name__ == "__main__":
    drawn = [name for name in list(globals()) if name.startswith("draw_")]
    for name in [f"draw_{word}" for word in sys.argv[1:]] or drawn:
        globals()[name]()
