"""The example of a project that gains callbacks: each by a line, and all by a file."""

from pathlib import Path

import pytest
import sklearn.datasets  # noqa: F401  # its first import sets environment variables
import torch
import yaml

from examples.existing_project import LINES, train
from lightning_hybrid.cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore:.*`tensorboardX` has been removed:UserWarning")

MEASURING = ("BatchTimeProfile", "GradientNoiseScaleMonitor", "UtilizationMonitor")
FILE = str(Path(__file__).parents[1] / "examples" / "existing_project.yaml")


def weights(trainer):
    return {name: value.clone() for name, value in trainer.lightning_module.state_dict().items()}


def is_same(found, expected):
    return all(found[name].equal(value) for name, value in expected.items())


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return weights(train(epochs=2, folder=str(tmp_path_factory.mktemp("plain"))))


@pytest.mark.parametrize("name", LINES)
def test_each_line_does_something_of_its_own(name, plain, tmp_path):
    trainer = train(name, epochs=2, folder=str(tmp_path))
    assert is_same(weights(trainer), plain) == (name in MEASURING)
    assert [type(callback).__name__ for callback in trainer.callbacks].count(name) == 1


def test_the_file_has_the_same_lines_and_gives_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["lightning-hybrid"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of what LightningCLI calls
    expected = train(*LINES, epochs=2, folder=str(tmp_path / "script"))
    with open(FILE) as file:
        assert [entry["class_path"] for entry in yaml.safe_load(file)["trainer"]["callbacks"]] == list(LINES)
    options = ["--trainer.max_epochs", "2", "--trainer.default_root_dir", str(tmp_path / "file")]
    assert main(["fit", "--config", FILE, *options]) == 0
    (path,) = (tmp_path / "file").rglob("*.ckpt")
    assert is_same(torch.load(path, weights_only=True)["state_dict"], weights(expected))
