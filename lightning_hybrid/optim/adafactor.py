"""Adafactor: second moments of matrices as means of their rows and columns, and no first moments."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from lightning_hybrid.compat import foreach
from lightning_hybrid.optim.arguments import check_at_least, check_pair, check_range
from lightning_hybrid.optim.base import Member, Request, Update, WholeTensorOptimizer, add, advance
from lightning_hybrid.optim.norms import squared_norms, vector_of
from lightning_hybrid.optim.wholes import Contribution

LEAST = 1e-37  # a normal number of float32 and bfloat16, and so is its inverse


class Adafactor(WholeTensorOptimizer):
    """Adaptive rates from second moments that are kept as the means of rows and of columns.

    For step t of a matrix w with gradient g, and beta = 1 - t^beta2_decay::

        R[i] = beta R[i] + (1 - beta) mean over j of (g[i, j]^2 + eps1)
        C[j] = beta C[j] + (1 - beta) mean over i of (g[i, j]^2 + eps1)
        u[i, j] = g[i, j] / sqrt(R[i] C[j] / mean(R))
        w = w - min(lr, 1 / sqrt(t)) max(eps2, RMS(w)) u / max(1, RMS(u) / clip_threshold)

    Means and root mean squares (RMS) are those of whole tensors, however they are sharded. A tensor with more
    dimensions is a batch of matrices over its two longest ones, the later of equal ones: a convolution `[64, 32, 3, 3]`
    has nine of 64 x 32. One whose second longest dimension is below `min_dim_size_to_factor`, such as a bias, keeps its
    moments whole: V = beta V + (1 - beta) (g^2 + eps1) and u = g / sqrt(V).

    Args:
        params: Parameters or groups.
        lr: The largest relative step: how far a tensor goes, as a part of its own root mean square.
        beta2_decay: From -1 to below 0.
        eps: eps1, at least 1e-37, and eps2.
        clip_threshold: Root mean square of u from which on it is made shorter.
        weight_decay: Decoupled: weights are first multiplied by 1 - lr * weight_decay, as by torch's optimizers.
        scale_parameter: Whether the factor max(eps2, RMS(w)) counts, and is 1 otherwise.
        relative_step: Whether 1 / sqrt(t) counts; otherwise the rate is `lr`, for a schedule of one's own.
        min_dim_size_to_factor: Least length of both dimensions of a matrix, at least 1.

    Raises:
        ValueError: If an option is outside its range.

    Source: Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost (2018), algorithms 4 to 6.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        *,
        beta2_decay: float = -0.8,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        min_dim_size_to_factor: int = 32,
    ) -> None:
        check_pair(self, eps=eps)
        check_at_least(self, 0, lr=lr, eps2=eps[1], weight_decay=weight_decay)
        check_at_least(self, LEAST, eps1=eps[0], clip_threshold=clip_threshold)
        check_at_least(self, 1, min_dim_size_to_factor=min_dim_size_to_factor)
        if not -1 <= beta2_decay < 0:
            raise ValueError(f"Adafactor(beta2_decay={beta2_decay!r}) must be from -1 to below 0.")
        defaults = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "clip_threshold": clip_threshold}
        defaults |= {"weight_decay": weight_decay, "scale_parameter": scale_parameter, "relative_step": relative_step}
        super().__init__(params, defaults | {"min_dim_size_to_factor": min_dim_size_to_factor})

    @override
    def update(self, group: dict[str, Any], members: Sequence[Member]) -> Update:
        """As `WholeTensorOptimizer` says."""
        check_range(self, members[0].data.dtype)
        matrices, others = split(members, group["min_dim_size_to_factor"])
        factors, members, count = Factors(matrices), [*matrices, *others], len(matrices)
        data, gradients = [member.data for member in members], [member.gradient for member in members]
        steps = advance(members)
        newness = [step ** group["beta2_decay"] for step in steps]
        squares = foreach("mul")(gradients, gradients)  # eps comes to their means, which are shorter
        of_data = squared_norms(members, data) if group["scale_parameter"] else []
        found = yield Request([*of_data, *factors.parts(squares[:count])])
        factors.advance(found[len(of_data) :], newness[:count], group["eps"][0])
        means = yield from factors.means()
        directions = factors.directions(gradients[:count], means, squares[:count])
        if others:
            moments = [member.entry("exp_avg_sq") for member in others]
            add(squares[count:], group["eps"][0])
            foreach("lerp_")(moments, squares[count:], newness[count:])
            directions += foreach("rsqrt")(moments)
            foreach("mul_")(directions[count:], gradients[count:])
        of_directions = yield Request(squared_norms(members, directions))
        rates = (root_mean_squares(members, of_directions) / group["clip_threshold"]).clamp(min=1).reciprocal()
        if of_data:
            rates *= root_mean_squares(members, found[: len(of_data)]).clamp(min=group["eps"][1])
        lr = float(group["lr"])
        rates *= vector([min(lr, step**-0.5) if group["relative_step"] else lr for step in steps], rates)
        if group["weight_decay"]:
            foreach("mul_")(data, 1 - lr * group["weight_decay"])
        foreach("addcmul_")(data, directions, rates.to(data[0].dtype).unbind(), value=-1.0)

    @override
    def collapsed(self, entry: str, shape: Sequence[int]) -> frozenset[int]:
        """As `WholeTensorOptimizer` says."""
        if entry not in {"exp_avg_sq_row", "exp_avg_sq_col"}:
            return frozenset()
        row, column = matrix_dims(shape)
        return frozenset({column if entry == "exp_avg_sq_row" else row})


class Factors:
    """Second moments of matrices, or batches of matrices.

    Rows and columns keep the dimensions of the parameter; a mean over one leaves it with length 1.

    Args:
        members: Parameters of one type.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self.dims = [matrix_dims(member.shape) for member in members]
        self.rows = [m.entry("exp_avg_sq_row", {column}) for m, (_, column) in zip(members, self.dims, strict=True)]
        self.columns = [m.entry("exp_avg_sq_col", {row}) for m, (row, _) in zip(members, self.dims, strict=True)]

    def parts(self, squares: Sequence[Tensor]) -> list[Contribution]:
        """What the squares here give to the means over columns, and over rows."""
        over = [*(column for _, column in self.dims), *(row for row, _ in self.dims)]
        owners = [*self.members] * 2
        sums = [values.sum(dim, keepdim=True) for values, dim in zip([*squares] * 2, over, strict=True)]
        if sums:
            foreach("div_")(sums, [float(member.shape[dim]) for member, dim in zip(owners, over, strict=True)])
        return [member.part(each, {dim}) for member, each, dim in zip(owners, sums, over, strict=True)]

    def advance(self, means: Sequence[Tensor], newness: Sequence[float], eps: float) -> None:
        """Move the moments.

        Args:
            means: Those of `parts`, over whole tensors.
            newness: Weights of the new squares.
            eps: What is added to each square.
        """
        if self.members:
            add(means, eps)
            foreach("lerp_")([*self.rows, *self.columns], means, [*newness] * 2)

    def means(self) -> Generator[Request, list[Tensor], list[Tensor]]:
        """Means of the rows, or of the columns, which have the same mean, where these are whole and rows are not.

        Only a matrix that is dealt out along both needs a sum, and with it an exchange.
        """
        found: list[Tensor] = []
        lengths: list[float] = []
        parts: dict[int, Contribution] = {}
        for member, (row, column), rows, columns in zip(self.members, self.dims, self.rows, self.columns, strict=True):
            dealt = {dealing.dim for dealing in member.dealings}
            values, dim = (columns, column) if row in dealt and column not in dealt else (rows, row)
            found.append(values.sum(dim, keepdim=True))
            lengths.append(float(member.shape[dim]))
            if dim in dealt:
                parts[len(found) - 1] = member.part(found[-1], {dim})
        if found:
            foreach("div_")(found, lengths)
        if parts:
            for i, whole in zip(parts, (yield Request(list(parts.values()))), strict=True):
                found[i] = whole
        return found

    def directions(self, gradients: Sequence[Tensor], means: Sequence[Tensor], out: Sequence[Tensor]) -> list[Tensor]:
        """Gradients over the roots of what the factors make, in the memory `out`; no product of two underflows."""
        if not self.members:
            return []
        of_rows, of_columns = foreach("rsqrt")(self.rows), foreach("rsqrt")(self.columns)
        foreach("mul_")(of_rows, foreach("sqrt")(list(means)))
        for gradient, column, direction in zip(gradients, of_columns, out, strict=True):
            torch.mul(gradient, column, out=direction)
        foreach("mul_")(list(out), of_rows)
        return list(out)


def root_mean_squares(members: Sequence[Member], squared: Sequence[Tensor]) -> Tensor:
    """Of whole tensors, as one vector, from sums of squares."""
    sums = vector_of(squared)
    return (sums / vector([max(1, math.prod(member.shape)) for member in members], sums)).sqrt()


def vector(values: Sequence[float], like: Tensor) -> Tensor:
    """Numbers in the type and on the device of a tensor, for which nothing waits."""
    return torch.tensor(values, dtype=like.dtype).to(like.device, non_blocking=True)


def matrix_dims(shape: Sequence[int]) -> tuple[int, int]:
    """The two longest dimensions in order, the later ones of equal ones."""
    row, column = sorted(sorted(range(len(shape)), key=lambda dim: (shape[dim], dim))[-2:])
    return row, column


def split(members: Sequence[Member], least: int) -> tuple[list[Member], list[Member]]:
    """Those whose second longest dimension has at least that length, and the others."""
    matrices, others = list[Member](), list[Member]()
    for member in members:
        is_matrix = len(member.shape) >= 2 and sorted(member.shape)[-2] >= least
        (matrices if is_matrix else others).append(member)
    return matrices, others
