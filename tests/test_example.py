import csv
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from examples import checkpoints as checkpoints_example
from examples import meta as meta_example
from examples import moe as moe_example
from examples.compression import main as compression
from examples.gpt import GPT, StandardLibrary, Windows, library_files, read, split
from examples.ledgers import main as ledgers
from examples.memory import main as memory
from lightning_hybrid.cli.main import main
from lightning_hybrid.functional.traffic import pipeline_bytes
from tests.launch import run_trainers


def tiny(**changes):
    return GPT(**{"width": 16, "depth": 2, "heads": 2, "context": 16, "learning_rate": 1e-2, **changes})


def test_held_out_files_are_a_few_and_never_trained_on():
    files = library_files()
    train, held_out = split(files)
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == files
    assert 0.02 < len(held_out) / len(files) < 0.1


def test_split_depends_on_names_alone():
    files = library_files()
    assert [set(side) for side in split(reversed(files))] == [set(side) for side in split(files)]


def test_library_is_without_tests_and_installed_packages():
    folders = {part for file in library_files() for part in file.parts[-3:-1]}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "encodings"}


def test_windows_cover_the_text_and_overlap_by_one_byte():
    text = torch.arange(22, dtype=torch.uint8)
    assert [piece.tolist() for piece in Windows(text, context=7)] == [
        list(range(8)),
        list(range(7, 15)),
        list(range(14, 22)),
    ]


def test_limited_windows_spread_over_the_text():
    windows = Windows(torch.arange(101, dtype=torch.uint8), context=10, limit=3)
    assert [int(windows[i][0]) for i in range(len(windows))] == [0, 30, 60]


def test_data_are_the_same_every_time():
    first, second = StandardLibrary(), StandardLibrary()
    for data in (first, second):
        data.setup("fit")
    assert torch.equal(first.train.text, second.train.text)
    assert torch.equal(next(iter(first.val_dataloader())), next(iter(second.val_dataloader())))


@pytest.mark.parametrize("tie_weights", [False, True])
def test_model_gives_logits_of_every_byte_from_those_before_it(tie_weights):
    model, text = tiny(tie_weights=tie_weights), torch.randint(256, (3, 12))
    logits = model(text)
    assert logits.shape == (3, 12, 256)
    changed = text.clone()
    changed[:, 8:] = 0
    torch.testing.assert_close(model(changed)[:, :8], logits[:, :8])
    assert (model.head.weight is model.embed.weight) == tie_weights


def test_untrained_model_knows_nothing_and_a_short_fit_teaches_it(tmp_path):
    text = read(split(library_files())[1])
    held_out = DataLoader(Windows(text, 16, limit=64), 64)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=40,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    model = tiny()
    (before,) = trainer.validate(model, held_out, verbose=False)
    trainer.fit(model, DataLoader(Windows(text, 16), 16), held_out)
    (after,) = trainer.validate(model, held_out, verbose=False)
    assert before["val/bits_per_byte"] == pytest.approx(8, abs=0.1)
    assert after["val/bits_per_byte"] < 6.5


def test_generated_text_continues_the_prompt():
    text = tiny().generate("def ", length=20)
    assert text.startswith("def ")
    assert len(text.encode()) >= 24


def ledgers_of_two(picture):
    communication, memory = ledgers(devices=2, max_steps=1, picture=picture)
    return communication.world["pipeline", "forward", "send", "float32"].payload, memory.ranks


def test_ledgers_count_what_the_example_sends_and_keeps(tmp_path):
    first, second = run_trainers(2, ledgers_of_two, str(tmp_path / "memory.png"))
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert first == second
    payload, ranks = first
    assert payload == pipeline_bytes(4 * 32 * 32 * 4, num_microbatches=4, num_stages=2)
    for totals in ranks:
        assert totals["trainable"] == totals["gradients"] < totals["states"] / 2 < totals["activations"]


def test_a_model_that_holds_less_has_the_same_bits(tmp_path, capsys):
    outcomes = memory(str(tmp_path), 3, ["all three"])
    plain, less = outcomes["plain"], outcomes["all three"]
    torch.testing.assert_close(less.weights, plain.weights, rtol=0, atol=0)
    assert less.saved < plain.saved / 4
    assert less.parameters < plain.parameters / 4
    assert min(less.recomputed, less.on_host) > plain.recomputed == plain.on_host == 0
    assert capsys.readouterr().out.count(" yes ") == 2
    assert {path.name for path in tmp_path.iterdir()} == {"plain.png", "all three.png"}


def test_a_network_that_is_compressed_without_loss_has_the_same_bits(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcomes = compression("OverFeat", max_steps=2)
    plain, lossless, *lossy = outcomes.values()
    torch.testing.assert_close(lossless.weights, plain.weights, rtol=0, atol=0)
    assert all(plain.saved > 1.5 * lossless.saved > 1.5 * outcome.saved for outcome in lossy)
    assert capsys.readouterr().out.count(" yes\n") == 2
    assert len(list((tmp_path / "compression").iterdir())) == 4
    with pytest.raises(SystemExit, match="'LeNet' is none of AlexNet, "):
        compression("LeNet")


def late(devices):
    return meta_example.main(devices, max_steps=3)


def test_no_process_holds_more_than_its_share_of_the_model_on_the_meta_device():
    ((held, whole, loss),) = run_trainers(1, late, 1)
    assert held == whole
    assert loss < 7.9  # of 8 bits
    for held, size, loss in run_trainers(2, late, 2):
        assert size == whole
        assert held == whole / 2
        assert loss < 7.9


def mixtures(folder):
    sizes = {"width": 16, "depth": 2, "heads": 2, "context": 16, "learning_rate": 2e-2}
    return moe_example.main(4, steps=12, num_seeds=2, picture=str(folder), **sizes)


def test_experts_over_four_processes_learn_beside_a_dense_model(tmp_path):
    first, *others = run_trainers(4, mixtures, tmp_path)
    assert others == [first] * 3
    assert len(first) == 2
    assert all(0 < bits < 7 for row in first for bits in row)  # 8 bits know nothing; nan is not below 7
    assert len({bits for row in first for bits in row}) == 4
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.png")) == [
        f"seed-{seed}/experts.png" for seed in range(2)
    ]


def test_mixture_and_dense_model_have_the_same_active_size_but_for_routers_and_biases():
    mixture, dense = moe_example.MoEGPT(), GPT()
    more = moe_example.active_size(mixture) - moe_example.active_size(dense)
    routers = sum(p.numel() for name, p in mixture.named_parameters() if ".router." in name)
    assert more == routers + 8 * 96  # the second expert's outer bias
    assert moe_example.active_size(dense) == sum(p.numel() for p in dense.parameters())


def never_stopped(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints_example, "STOP", None)
        trainer = checkpoints_example.train("auto", folder, 1, checkpoints_example.BATCH)
    return trainer.callback_metrics["train/bits_per_byte"], trainer.lightning_module.state_dict()


def commanded(folder, path):
    """Runs two steps more from the command line, from a folder, and two more from the file of that."""
    sys.argv[1:] = []  # Lightning warns of arguments given twice
    sizes = {"width": 32, "depth": 4, "heads": 2, "context": 32}
    model = ["--model=examples.gpt.GPT", *(f"--model.init_args.{name}={number}" for name, number in sizes.items())]
    data = ["--data=examples.gpt.StandardLibrary", "--data.init_args.context=32"]
    options = {"accelerator": "cpu", "devices": 1, "limit_val_batches": 0, "log_every_n_steps": 1}
    options |= {"enable_progress_bar": "false", "strategy": "hybrid_ptdp"}
    options |= {"logger": "lightning.pytorch.loggers.CSVLogger", "logger.save_dir": folder}
    trainer = [f"--trainer.{name}={value}" for name, value in options.items()]
    steps = []
    for version, most in enumerate((10, 12)):
        more = [f"--trainer.max_steps={most}", f"--ckpt_path={path}"]
        main(["fit", "--seed_everything=0", *model, *data, *trainer, *more])
        logs = folder / f"lightning_logs/version_{version}"
        with open(logs / "metrics.csv") as metrics:
            steps.append([int(row["step"]) for row in csv.DictReader(metrics)])
        (path,) = logs.glob("checkpoints/*.ckpt")
    return steps


@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before the epoch")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_run_that_stops_and_goes_on_in_another_layout_ends_as_if_it_had_not(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["lightning-hybrid"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of what LightningCLI calls
    folder, file = tmp_path / "folders", tmp_path / "whole.ckpt"
    found = run_trainers(2, checkpoints_example.main, str(folder), timeout=120)
    ((expected, state),) = run_trainers(1, never_stopped, tmp_path / "one")
    assert [float(bits) for bits in found] == pytest.approx([float(expected)] * 2, rel=1e-5)
    assert sorted(path.name for path in folder.iterdir()) == ["last.ckpt", *(f"step={n}.ckpt" for n in (2, 4, 6, 8))]
    assert main(["checkpoint", "verify", str(folder / "last.ckpt")]) == 0
    assert main(["checkpoint", "export", str(folder / "last.ckpt"), str(file)]) == 0
    assert torch.load(file, weights_only=True)["global_step"] == checkpoints_example.STEPS
    assert run_trainers(1, commanded, tmp_path / "logs", folder / "last.ckpt") == [[[8, 9], [10, 11]]]
    loaded = GPT.load_from_checkpoint(file).state_dict()
    torch.testing.assert_close(loaded, state, rtol=1e-3, atol=1e-5)  # AdamW's first steps enlarge rounding


def fp16(folder):
    """Runs the configuration for a few steps of a smaller model."""
    sys.argv[1:] = []  # Lightning warns of arguments given twice
    small = {"width": 32, "depth": 2, "context": 16}
    sizes = [f"--model.init_args.{name}={number}" for name, number in small.items()]
    data = ["--data.init_args.context=16", "--data.init_args.validation_pieces=16"]
    steps = {"max_steps": 6, "val_check_interval": 6, "log_every_n_steps": 1, "enable_progress_bar": "false"}
    trainer = [f"--trainer.{name}={value}" for name, value in steps.items()]
    logger = ["--trainer.logger=lightning.pytorch.loggers.CSVLogger", f"--trainer.logger.save_dir={folder}"]
    config = Path(__file__).parents[1] / "examples/gpt_fp16.yaml"
    main(["fit", "--config", str(config), *sizes, *data, *trainer, *logger])


def test_float16_over_four_processes_learns(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["lightning-hybrid"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of what LightningCLI calls
    run_trainers(4, fp16, tmp_path, timeout=240)
    with open(tmp_path / "lightning_logs/version_0/metrics.csv") as file:
        logged = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    assert logged[-1]["val/bits_per_byte"] < logged[0]["train/bits_per_byte"] < 8.5


def llama_3d(folder, *options):
    """Runs the configuration for three steps of a smaller model."""
    sys.argv[1:] = []  # Lightning warns of arguments given twice
    small = {"width": 32, "depth": 4, "context": 16}
    sizes = [f"--model.init_args.{name}={number}" for name, number in small.items()]
    data = ["--data.init_args.context=16", "--data.init_args.validation_pieces=16"]
    steps = {"max_steps": 3, "val_check_interval": 3, "log_every_n_steps": 1, "enable_progress_bar": "false"}
    trainer = [f"--trainer.{name}={value}" for name, value in steps.items()]
    logger = ["--trainer.logger=lightning.pytorch.loggers.CSVLogger", f"--trainer.logger.save_dir={folder}"]
    config = Path(__file__).parents[1] / "examples/llama_3d.yaml"
    main(["fit", "--config", str(config), *sizes, *data, *trainer, *logger, *options])


def test_llama_over_pipeline_and_tensor_trains_as_one_process(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["lightning-hybrid"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of what LightningCLI calls
    run_trainers(4, llama_3d, tmp_path / "four", timeout=240)
    llama_3d(tmp_path / "one", "--trainer.devices=1", "--trainer.strategy=auto")
    logged = []
    for name in ("four", "one"):
        with open(tmp_path / name / "lightning_logs/version_0/metrics.csv") as file:
            logged.append([{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)])
    four, one = logged
    assert len(four) == 4  # three steps and a validation
    assert [row == pytest.approx(other, rel=1e-4) for row, other in zip(four, one, strict=True)] == [True] * 4
    assert four[-1]["val/bits_per_byte"] < four[0]["train/bits_per_byte"] < 8.5
