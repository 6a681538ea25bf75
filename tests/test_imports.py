"""The package's shape: which layer may import which, whose private names are used where, and how long things get."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_hybrid"
FILES = sorted(PACKAGE.rglob("*.py"))
GLUE = ("strategies", "precision", "callbacks", "metrics", "experts")

MAY_IMPORT = {  # layer -> what of our package and of Lightning it may import; the standard library and torch are free
    "functional": {"functional"},
    "optim": {"optim", "functional", "compat"},
    "parallel": {"parallel", "optim", "functional", "compat"},
    **{layer: {layer, "parallel", "optim", "functional", "compat", "lightning"} for layer in GLUE},
    "compat": {"lightning"},
}
MAY_IMPORT["callbacks"].add("metrics")  # which they feed
NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}  # documented: the underscore keeps them apart from fields
DOCUMENTED = NAMED_TUPLE | {"_exit"}  # ... and os._exit is documented too
EVERYTHING = {"cli", "__init__", "__main__"}  # may import all of it
LONGEST_FILE, LONGEST_FUNCTION = 300, 40  # lines; a function's docstring is not counted
LONGEST_LIST = 450  # of compat.py, which is a list of unrelated short functions, and one file by rule

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))


def layer_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_names(tree):
    """Dotted names, ``from a import b`` as ``a.b``; imports for type checkers count too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def forbidden_imports(layer, tree):
    for name in imported_names(tree):
        library, _, rest = name.partition(".")
        inner = rest.split(".")[0] if library == "lightning_hybrid" else library
        ours = library in {"lightning_hybrid", "lightning"}
        if layer not in EVERYTHING and ours and inner not in MAY_IMPORT[layer]:
            yield f"{layer} may not import {name}"
        if layer == "functional" and name.startswith("torch.distributed"):
            yield f"{layer} may not communicate: {name}"
        if library in {"pytorch_lightning", "lightning_fabric"}:
            yield f"{name} is not the namespace that we build on"


def is_private(name):
    return name.startswith("_") and not name.endswith("__") and name not in DOCUMENTED


def defined_names(tree):
    """Names that a file gives to functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def used_attributes(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"getattr", "setattr", "hasattr"}:
            yield from (a.value for a in node.args[1:2] if isinstance(a, ast.Constant) and isinstance(a.value, str))


def private_uses(tree):
    """Private names from elsewhere: in an import, or an attribute that this file does not itself define."""
    for name in imported_names(tree):
        if any(is_private(part) for part in name.split(".")):
            yield f"import of {name}"
    for name in sorted({*used_attributes(tree)} - {*defined_names(tree)}):
        if is_private(name):
            yield f"attribute {name}"


def code_lines(function):
    """Lines from the first statement after the docstring to the last."""
    body = function.body if ast.get_docstring(function) is None else function.body[1:]
    return function.end_lineno - body[0].lineno + 1 if body else 0


@each_file
def test_imports_point_downwards(path):
    layer = layer_of(path)
    assert layer in MAY_IMPORT or layer in EVERYTHING, f"say in MAY_IMPORT what {layer} may import"
    assert not list(forbidden_imports(layer, ast.parse(path.read_text())))


@each_file
def test_private_names_of_others_stand_in_compat_alone(path):
    assert layer_of(path) == "compat" or not list(private_uses(ast.parse(path.read_text())))


@each_file
def test_files_and_functions_are_short(path):
    source = path.read_text()
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    longest = LONGEST_LIST if layer_of(path) == "compat" else LONGEST_FILE
    assert len(source.splitlines()) <= longest
    assert not [f"{f.name}: {code_lines(f)} lines" for f in functions if code_lines(f) > LONGEST_FUNCTION]


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("functional", "import torch.distributed as dist"),
        ("functional", "from torch.distributed.tensor import DTensor"),
        ("functional", "from lightning_hybrid.parallel.mesh import Mesh"),
        ("functional", "from lightning_hybrid import HybridPTDPStrategy"),
        ("parallel", "from lightning.pytorch import Trainer"),
        ("parallel", "if TYPE_CHECKING:\n    import lightning"),
        ("callbacks", "from lightning_hybrid.strategies.hybrid import HybridPTDPStrategy"),
        ("strategies", "from pytorch_lightning import Trainer"),
    ],
)
def test_upward_imports_are_found(layer, source):
    assert list(forbidden_imports(layer, ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "from torch.distributed._tools import x",
        "from lightning.pytorch.loops import _EvaluationLoop",
        "trainer.fit_loop._should_accumulate()",
        "getattr(module, '_modules')",
        "class A(Strategy):\n    def f(self):\n        return self._lightning_module",
    ],
)
def test_private_names_are_found(source):
    assert list(private_uses(ast.parse(source)))


def test_private_names_of_the_file_itself_are_its_own_matter():
    assert not list(private_uses(ast.parse("class A:\n    def f(self):\n        self._x = 1\n        return self._x")))
