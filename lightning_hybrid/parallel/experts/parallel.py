"""What expert parallelism has made of one rank's model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.functional.splits import Split
from lightning_hybrid.parallel.data_parallel import maxima
from lightning_hybrid.parallel.experts.bank import ExpertBank
from lightning_hybrid.parallel.experts.exchange import TokenExchange
from lightning_hybrid.parallel.experts.published import PublishedBank, adopt_published, unknown_experts
from lightning_hybrid.parallel.mesh import Mesh


class ExpertParallel:
    """Holds a share of the experts of every layer, and leads back to the whole.

    Args:
        root: The whole model, changed in place: parameters of experts keep their identity and get their share as data.
        mesh: Groups of this rank.

    Attributes:
        banks: The layers' experts by name.
        has_all: Every rank has all experts for now.
        splits: By name of their parameters, second names of shared ones too.
    """

    def __init__(self, root: nn.Module, mesh: Mesh) -> None:
        assert mesh.expert_group is not None
        self._mesh, self._group = mesh, mesh.expert_group
        self.size, self.rank = self._group.size(), mesh.expert_rank
        adopt_published(root)
        self.banks = banks_of(root)
        check_banks(self.banks, self.size, unknown_experts(root))
        numbers = {id(p): bank.num_experts for bank in self.banks.values() for p in bank.parameters()}
        named = list(root.named_parameters(remove_duplicate=False))
        self.splits = {name: Split(0, (numbers[id(p)],)) for name, p in named if id(p) in numbers}
        cut = set[int]()
        for name, parameter in named:
            if name in self.splits and id(parameter) not in cut:
                cut.add(id(parameter))
                parameter.data = self.part(name, parameter.data)
        exchanges = [TokenExchange(self._group, number, name) for number, name in enumerate(self.banks)]
        self._exchanges, self.has_all = dict(zip(self.banks, exchanges, strict=True)), False
        self._show(self._exchanges, {})

    def table(self) -> str:
        """What is split, a line for layers of one kind."""
        kinds: dict[tuple[str, int], list[str]] = {}
        for name, bank in self.banks.items():
            kinds.setdefault((type(bank).__name__, bank.num_experts), []).append(name)
        return "\n".join(
            f"experts: {len(names)} x {kind}, {number} experts each and {number // self.size} of them on a rank, "
            f"{names[0]}{f' to {names[-1]}' if len(names) > 1 else ''}"
            for (kind, number), names in kinds.items()
        )

    def parameters(self) -> list[nn.Parameter]:
        """Those of experts that are here."""
        return [parameter for bank in self.banks.values() for parameter in bank.parameters()]

    def part(self, name: str, whole: Any) -> Any:
        """This rank's share of a whole value of a parameter, or of an optimizer's state of the same shape."""
        split = self.splits.get(name)
        if split is None or not isinstance(whole, Tensor) or whole.ndim == 0 or len(whole) != split.length:
            return whole
        return split.take(whole, self.size, self.rank).clone(memory_format=torch.contiguous_format)

    def whole(self, name: str, part: Tensor) -> Tensor:
        """The whole of a value that is dealt out as its parameter, if that is one of experts; their ranks call it.

        Args:
            name: The parameter's.
            part: This rank's share, in any memory; not sharded over the data axis any more.
        """
        if name not in self.splits:
            return part
        return self._gathered(part.detach().to(self._mesh.device))

    def differ(self, number: int, *, wanted: bool) -> bool:
        """Whether replicas run different forward passes, so that tokens cannot travel; all of them call it together.

        Args:
            number: Passes that this replica is going to run.
            wanted: It may run others besides.
        """
        least, most, any_wants = maxima(self._mesh, -number, number, int(wanted))
        return bool(any_wants) or -least != most

    @contextmanager
    def with_all(self) -> Iterator[None]:
        """Context in which every rank has all experts, and sends no tokens; parameters must be whole on entry."""
        wholes = {
            name: {key: self._gathered(p.detach()) for key, p in bank.named_parameters()}
            for name, bank in self.banks.items()
            if all(p.numel() for p in bank.parameters())  # else another stage has them
        }
        self._show({}, wholes)
        self.has_all = True
        try:
            yield
        finally:
            self.has_all = False
            self._show(self._exchanges, {})

    def _show(self, exchanges: dict[str, TokenExchange], wholes: dict[str, dict[str, Tensor]]) -> None:
        for name, bank in self.banks.items():
            bank.exchange, bank.wholes = exchanges.get(name), wholes.get(name)

    def _gathered(self, part: Tensor) -> Tensor:
        whole = part.new_empty(self.size, *part.shape)
        dist.all_gather(list(whole.unbind()), part.contiguous(), group=self._group)
        return whole.flatten(0, 1)


def banks_of(root: nn.Module) -> dict[str, ExpertBank | PublishedBank]:
    """Experts of all layers, by name."""
    return {name: module for name, module in root.named_modules() if isinstance(module, ExpertBank | PublishedBank)}


def parameters_of_experts(root: nn.Module) -> set[nn.Parameter]:
    """What `ExpertParallel` would split of a whole model."""
    adopt_published(root)
    return {parameter for bank in banks_of(root).values() for parameter in bank.parameters()}


def check_banks(banks: Mapping[str, ExpertBank | PublishedBank], size: int, unknown: str = "") -> None:
    """Refuse what cannot be split.

    Args:
        banks: Experts by name.
        size: Ranks over which they are split.
        unknown: What seems to be experts and is none of them.

    Raises:
        ValueError: Naming the layer, or saying that there is none.
    """
    if not banks:
        raise ValueError(
            f"expert_parallel_size={size} splits experts, and the model has none that are known: neither a "
            "lightning_hybrid.experts.MoELayer nor stacked experts of transformers. "
            f"{unknown or 'Nothing in it looks like experts.'} Leave expert_parallel_size 1."
        )
    for name, bank in banks.items():
        if bank.num_experts % size:
            raise ValueError(
                f"expert_parallel_size={size} does not divide the {bank.num_experts} experts of {name}. Choose a "
                "divisor of their number."
            )
