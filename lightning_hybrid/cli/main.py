"""The console script ``lightning-hybrid``: LightningCLI's commands and our own tools.

Ranks that Lightning starts run the same command line again, so everything here may run once a rank.
"""

import sys
from importlib import import_module
from pathlib import Path

TOOLS = {  # command -> its line in the help; main of the module with its name in lightning_hybrid.cli runs it
    "checkpoint": "look at a checkpoint, make one file of it, or check it",
    "demo": "train a small GPT on four processes of this machine",
    "elastic": "start torchrun's agent for a run that grows with its nodes",
    "plan-tensor": "print which module of a model tensor parallelism splits, and how",
    "schedule": "draw a pipeline schedule",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments behind ``lightning-hybrid``; None: those of the process.

    Returns:
        Exit status. Arguments that cannot work end the process with status 2, as argparse does.
    """
    folder = str(Path.cwd())
    if folder not in sys.path:  # a console script has its own folder there; models lie in the user's
        sys.path.insert(0, folder)
    args = sys.argv[1:] if argv is None else argv
    if args and args[0] in TOOLS:
        return int(import_module(f"lightning_hybrid.cli.{args[0].replace('-', '_')}").main(args[1:]))
    _lightning(argv if args else ["--help"])
    return 0


def _lightning(args: list[str] | None) -> None:  # None lets Lightning read sys.argv, without a warning
    """Run ``fit``, ``validate``, ``test`` or ``predict``; any model and data by ``class_path``, strategies by name."""
    from lightning.pytorch.cli import LightningCLI  # here, so that the tools start without it

    for part in ("callbacks", "metrics", "optim"):  # with the package, which registers strategies: all have short names
        import_module(f"lightning_hybrid.{part}")
    tools = "; ".join(f"{name}: {line}" for name, line in TOOLS.items())
    LightningCLI(
        args=args,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={
            "prog": "lightning-hybrid",
            "description": "Train, validate, test or predict with Lightning and hybrid parallelism.",
            "epilog": f"More commands, each with its own --help. {tools}.",
        },
    )
