import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from lightning_hybrid.cli import demo
from lightning_hybrid.cli.main import main
from lightning_hybrid.functional.schedules import interleaved_1f1b
from lightning_hybrid.functional.simulation import simulate, theoretical_bubble_share

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["lightning-hybrid"])  # Lightning warns of arguments given twice
    monkeypatch.setattr(sys, "path", list(sys.path))


def printed(capsys, *args: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(args))
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("args", [["--help"], []])
def test_help_names_every_command(capsys, args):
    text = printed(capsys, *args)
    for command in ("fit", "validate", "test", "predict", "checkpoint", "demo", "schedule"):
        assert command in text.replace("lightning-hybrid", "")


def test_callbacks_have_short_names(capsys):
    options = ["--model", "examples.gpt.GPT", "--trainer.callbacks+=MemoryLedger", "--trainer.callbacks.depth=2"]
    text = printed(capsys, "fit", *options, "--print_config")
    assert "class_path: lightning_hybrid.callbacks.MemoryLedger" in text
    assert "depth: 2" in text


@pytest.mark.parametrize("tool", ["checkpoint", "demo", "schedule"])
def test_tools_have_their_own_help(capsys, tool):
    assert printed(capsys, tool, "--help").startswith(f"usage: lightning-hybrid {tool}")


def test_printed_config_of_the_example_gives_itself(capsys, tmp_path):
    first = printed(capsys, "fit", "--config", "examples/gpt.yaml", "--print_config")
    strategy = yaml.safe_load(first)["trainer"]["strategy"]
    assert strategy["class_path"].startswith("lightning_hybrid.")
    assert strategy["init_args"].items() >= {"pipeline_parallel_size": 2, "num_chunks": 2}.items()
    (tmp_path / "again.yaml").write_text(first)
    assert printed(capsys, "fit", "--config", str(tmp_path / "again.yaml"), "--print_config") == first


def test_tensor_plan_and_sequence_mode_come_from_a_config(capsys, tmp_path):
    text = (ROOT / "examples/gpt.yaml").read_text()
    written = {"tensor_parallel_size": 2, "tensor_parallel_plan": {"*.up": "colwise"}, "sequence_parallel": "regather"}
    config = yaml.safe_load(text)
    config["trainer"]["strategy"]["init_args"] |= written
    (tmp_path / "split.yaml").write_text(yaml.safe_dump(config))
    printed_config = printed(capsys, "fit", "--config", str(tmp_path / "split.yaml"), "--print_config")
    assert yaml.safe_load(printed_config)["trainer"]["strategy"]["init_args"].items() >= written.items()


def test_misspelt_strategy_argument_is_refused_by_name(capsys, tmp_path):
    text = (ROOT / "examples/gpt.yaml").read_text().replace("num_chunks", "num_chunk")
    (tmp_path / "wrong.yaml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", str(tmp_path / "wrong.yaml"), "--print_config"])
    assert ended.value.code == 2
    assert "num_chunk" in capsys.readouterr().err


def test_models_of_the_working_folder_are_found(capsys, monkeypatch, tmp_path):
    shutil.copy(ROOT / "examples/gpt.py", tmp_path / "own_model.py")
    monkeypatch.chdir(tmp_path)
    text = printed(capsys, "fit", "--model", "own_model.GPT", "--data", "own_model.StandardLibrary", "--print_config")
    assert yaml.safe_load(text)["model"]["class_path"] == "own_model.GPT"
    del sys.modules["own_model"]


def test_demo_says_where_the_example_is_to_be_had(capsys, monkeypatch):
    monkeypatch.setattr(demo, "find_example", lambda: None)
    assert main(["demo"]) == 1
    assert "make demo" in capsys.readouterr().err


def test_demo_finds_the_checkout_from_anywhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    path = demo.find_example()
    assert path == ROOT / "examples/gpt.py"


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 1)])
def test_bubble_share_of_a_simulated_step_is_the_theory(p, m, v):
    from lightning_hybrid.functional.lowering import lower

    events = simulate(lower(interleaved_1f1b(p, m, v), p * v)).events
    assert demo.bubble_share(list(events)) == pytest.approx(theoretical_bubble_share(p, m, v))


def small_example(path):
    example = demo.load_example(path)

    class SmallGPT(example.GPT):
        def __init__(self):
            super().__init__(width=16, depth=1, heads=2)

    class FewPieces(example.StandardLibrary):
        def __init__(self, batch_size):
            super().__init__(batch_size, validation_pieces=8)

    return SimpleNamespace(GPT=SmallGPT, StandardLibrary=FewPieces)


def test_demo_trains_in_one_process(capsys, tmp_path, monkeypatch):
    example = small_example(demo.find_example())
    monkeypatch.setattr(demo, "load_example", lambda path: example)
    assert demo.main(["--processes", "1", "--steps", "2", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "4 steps of 16 x 128 bytes" in text
    assert "bits per byte on held-out files: 8.0" in text
    assert "    def " in text
    assert (tmp_path / "gpt.ckpt").exists()
