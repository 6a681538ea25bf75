"""What the documentation says exists: pages, links, names, commands and code that compiles."""

import ast
import importlib
import re
from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback

import lightning_hybrid
from lightning_hybrid import callbacks, experts, metrics, optim

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)
TEXTS = [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]

each_text = pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))


def code_blocks(path, language):
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def prose(path):
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(path):
    """Headings as the anchors that links name: lower case, words joined by hyphens."""
    headings = re.findall(r"^#+ (.+)$", prose(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def listed(page):
    """The pages that the tables of contents of one of them name."""
    lines = [line for block in code_blocks(page, r"\{toctree\}") for line in block.splitlines()]
    return {(page.parent / f"{line}.md").resolve() for line in lines if line and not line.startswith(":")}


def test_every_page_is_in_a_table_of_contents():
    assert set().union(*map(listed, PAGES)) == set(PAGES) - {DOCS / "index.md"}


def test_every_public_name_is_in_the_interface_page():
    text = (ROOT / "docs" / "api.md").read_text()
    names = [name for part in (lightning_hybrid, callbacks, experts, metrics, optim) for name in part.__all__]
    assert not [name for name in names if not re.search(rf"\b{name}\b", text)]


@each_text
def test_links_between_pages_resolve(path):
    for target in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", prose(path)):
        file, _, anchor = target.partition("#")
        page = (path.parent / file).resolve() if file else path
        assert page.exists(), f"{target} leads nowhere"
        assert not anchor or page.suffix != ".md" or anchor in anchors(page), f"{target}: no such heading"


@each_text
def test_python_code_compiles_and_imports_what_is_there(path):
    for block in code_blocks(path, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "lightning_hybrid":
                module = importlib.import_module(node.module)
                assert not [alias.name for alias in node.names if not hasattr(module, alias.name)]


@each_text
def test_yaml_parses_and_names_classes_that_are_there(path):
    for block in code_blocks(path, "yaml"):
        yaml.safe_load(block)
        for module, name in re.findall(r"class_path: (lightning_hybrid[\w.]*)\.(\w+)", block):
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


@each_text
def test_make_targets_exist(path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"(?:`|\$ )make ([a-z-]+)", path.read_text())) <= targets


@each_text
def test_callbacks_of_configurations_can_be_made(path, monkeypatch):
    """By jsonargparse, as LightningCLI does, which takes types of arguments from annotations."""
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    for block in code_blocks(path, "yaml"):
        given = yaml.safe_load(block).get("trainer", {}).get("callbacks")
        if given is not None:
            parser = ArgumentParser(exit_on_error=False)
            parser.add_argument("--callbacks", type=list[Callback])
            made = parser.instantiate_classes(parser.parse_object({"callbacks": given})).callbacks
            names = [entry["class_path"].rpartition(".")[2] for entry in given]
            assert [type(callback).__name__ for callback in made] == names


def test_defaults_of_callbacks_survive_configurations(monkeypatch):
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    given = {
        "BatchSizeGrowth": {"milestones": {30: 2, 60: 1.5}},
        "KFACPreconditioner": {"damping": {0: 0.1, 10: 1}, "factor_every": {0: 2}},
        "OptimizerRestart": {},
        "DivergenceRollback": {"skip_batches": 3},
        "GradientNoise": {},
        "LearningRateWarmup": {"steps": 3},
        "ExpertMonitor": {},
        "CommunicationLedger": {},
        "MemoryLedger": {},
    }
    for name, arguments in given.items():
        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument("--callback", type=Callback)
        entry = {"class_path": f"lightning_hybrid.callbacks.{name}", "init_args": arguments}
        made = parser.instantiate_classes(parser.parse_object({"callback": entry})).callback
        assert type(made) is getattr(callbacks, name)
