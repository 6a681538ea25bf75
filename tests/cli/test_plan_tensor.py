import sys
from pathlib import Path

import pytest

from lightning_hybrid.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ("plan-tensor", "--config", "examples/gpt.yaml")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["lightning-hybrid"])
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_documented_table_is_what_is_printed(capsys):
    assert main([*EXAMPLE, "--tensor_parallel_size", "2"]) == 0
    printed = capsys.readouterr().out
    assert "blocks.{0..7}.qkv     fused_qkv  weight 144x96 of 288x96 in 3 sections\n" in printed
    assert printed in (ROOT / "docs/cli.md").read_text()


def test_options_count_instead_of_the_strategys(capsys):
    options = ["--tensor_parallel_size", "4", "--sequence_parallel", "regather"]
    plan = '{"*.grow": "colwise", "shrink": "rowwise"}'
    assert main([*EXAMPLE, *options, "--tensor_parallel_plan", plan]) == 0
    printed = capsys.readouterr().out
    assert "blocks.{0..7}.grow    colwise   weight 96x96 of 384x96, bias 96 of 384\n" in printed
    assert "blocks.{0..7}.norm1   sequence" in printed
    assert "fused_qkv" not in printed


def test_strategies_by_name_and_files_of_fit_work(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["fit", "--config", "examples/gpt.yaml", "--trainer.strategy", "hybrid_ptdp", "--print_config"])
    (tmp_path / "full.yaml").write_text(capsys.readouterr().out)
    assert main(["plan-tensor", "--config", str(tmp_path / "full.yaml"), "--tensor_parallel_size", "2"]) == 0
    assert "head                  vocab" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "tensor_parallel_size=1 splits nothing"),
        (["--tensor_parallel_size", "3"], "4 query heads and 4 key-value heads, which tensor_parallel_size=3"),
        (["--tensor_parallel_size", "2", "--tensor_parallel_plan", '{"qvk": "colwise"}'], "Near it: qkv"),
    ],
)
def test_plans_that_cannot_work_are_one_line(capsys, options, words):
    assert main([*EXAMPLE, *options]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "Seed set" not in line]
    assert line.startswith("lightning-hybrid plan-tensor: ")
    assert words in line


def test_help_tells_the_options(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan-tensor"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "--tensor_parallel_size" in printed
    assert "--sequence_parallel" in printed
