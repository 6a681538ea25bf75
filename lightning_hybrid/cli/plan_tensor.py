"""``lightning-hybrid plan-tensor``: print a tensor plan without training and without processes.

The model is built as ``fit`` builds it, from the same configuration file and options; no Trainer is made, so that the
machine needs no GPUs.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from typing import Any, Literal

from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lightning_hybrid.parallel.pipeline.blocks import block_names, find_block_lists
from lightning_hybrid.parallel.tensor.plan import make_plan, plan_table

KEYWORDS = ("tensor_parallel_size", "tensor_parallel_plan", "sequence_parallel")


class PlanCLI(LightningCLI):
    """LightningCLI that builds the model and the strategy, and stops there."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the strategy's keywords that a plan depends on, and what `fit` takes and a plan does not need."""
        add, instead = parser.add_argument, "instead of the strategy's"
        add("--tensor_parallel_size", type=int | None, help=f"ranks on the tensor axis, {instead}")
        add("--tensor_parallel_plan", type=Literal["auto"] | dict[str, str] | None, help=f"style by pattern, {instead}")
        add("--sequence_parallel", type=bool | Literal["regather"] | None, help=f"true, false or regather, {instead}")
        for name in ("ckpt_path", "weights_only"):
            add(f"--{name}", type=Any, help="passed over; files for fit may have it")

    def instantiate_classes(self) -> None:
        """Build what the configuration names, but no Trainer."""
        self.config_init = self.parser.instantiate_classes(self.config)

    def table(self) -> str:
        """The plan as a table.

        Raises:
            ValueError: If there is nothing to split, or the plan is wrong.
        """
        module: LightningModule = self.config_init["model"]
        module.configure_model()
        options = {**getattr(self.config_init["trainer"]["strategy"], "options", {})}
        options |= {name: self.config[name] for name in KEYWORDS if self.config[name] is not None}
        size = options.get("tensor_parallel_size", 1)
        if size < 2:
            raise ValueError(
                f"tensor_parallel_size={size} splits nothing. Set it in the strategy's arguments, or give "
                "--tensor_parallel_size 2."
            )
        blocks = block_names(module, find_block_lists(module, options.get("pipeline_layers")))
        plan, sequence = options.get("tensor_parallel_plan", "auto"), options.get("sequence_parallel", False)
        return plan_table(module, make_plan(module, blocks, size, plan, sequence_parallel=bool(sequence)), size)


def main(argv: list[str]) -> int:
    """Run the command.

    Args:
        argv: Arguments behind ``lightning-hybrid plan-tensor``.

    Returns:
        Exit status: 2 for a plan that cannot work, else 0. Arguments that cannot work end the process with status 2, as
        argparse does.
    """
    import_module("lightning_hybrid.callbacks")  # with the package, which registers strategies: all have short names
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "LightningCLI's args parameter")  # it is meant for scripts, and so is this
        warnings.simplefilter("ignore", DeprecationWarning)  # LightningCLI calls its parser by older names
        cli = PlanCLI(
            args=argv or ["--help"],
            run=False,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=None,
            parser_kwargs={
                "prog": "lightning-hybrid plan-tensor",
                "description": "Print which module of a model tensor parallelism splits, and how.",
            },
        )
    try:
        print(cli.table())
    except ValueError as error:
        print(f"lightning-hybrid plan-tensor: {error}", file=sys.stderr)
        return 2
    return 0
