"""Real torchrun jobs on the CPU: uninterrupted against stopped and resumed, step by step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from lmms_stream.demo.compare import Run, compare_runs, read_run
from lmms_stream.demo.corpus import VOCABULARY
from lmms_stream.demo.jobs import run_job
from lmms_stream.errors import TrainingError
from lmms_stream.train.checkpoint.checkpoint import checkpoints
from lmms_stream.train.launch import torchrun_command
from lmms_stream.train.report.train_log import read_log

from tests.conftest import last_words, run_command

STEPS_PER_EPOCH_AT_LEAST = 3


def write_config(path: Path, dataset: Path, tokenizer: Path, **train: Any) -> Path:
    settings = {
        "dataset": {
            "remote": str(dataset),
            "processor": {"tokenizer": str(tokenizer)},
            "packing_length": 1024,
            "overlong": "drop",
            "num_canonical_nodes": 2,
        },
        "model": {
            "config": {
                "model_type": "llama",
                "vocab_size": VOCABULARY,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
            }
        },
        "train": {
            "output_dir": str(path.parent / "default"),
            "global_batch": 24,
            "learning_rate": 1e-3,
            "num_workers": 1,
            "log_sample_ids": True,
        }
        | train,
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def ignore(step: int) -> None:
    """No progress display."""


def train(config: Path, output: Path, *overrides: str, nproc: int = 2) -> None:
    command = torchrun_command(config, [f"train.output_dir={output}", *overrides], nproc=nproc)
    result = run_command(*command, timeout_s=200)
    assert result.returncode == 0, last_words(result.stderr)


def test_a_run_in_lanes_resumes_on_another_number_of_ranks(
    dataset_folder: Path, tokenizer: Path, tmp_path: Path
) -> None:
    """Without a lengths index: the states of all ranks' lanes are in the checkpoint."""
    lanes = ["dataset.packing_mode=lanes", "dataset.num_canonical_nodes=4", "dataset.packing_window=32"]
    config = write_config(tmp_path / "run.yaml", dataset_folder, tokenizer, max_steps=6, lr_scheduler_type="constant")
    train(config, tmp_path / "whole", *lanes)
    whole = read_run(tmp_path / "whole", name="whole", tolerance=0)
    stopped = tmp_path / "stopped"
    train(config, stopped, *lanes, "train.max_steps=2")
    train(config, stopped, *lanes, nproc=1)
    resumed = read_run(stopped, name="resumed", tolerance=1e-3)
    _, differences = compare_runs(whole, [resumed], first_step=1, last_step=6)
    assert differences == []


def test_resumes_give_the_run_that_was_never_interrupted(dataset_folder: Path, tokenizer: Path, tmp_path: Path) -> None:
    """Two epochs at once; against them: stopped after the first epoch's last step, resumed, and resumed again."""
    config = write_config(tmp_path / "run.yaml", dataset_folder, tokenizer, num_train_epochs=2, save_steps=1)
    train(config, tmp_path / "whole")
    whole = read_run(tmp_path / "whole", name="whole", tolerance=0)
    last = max(whole.records)
    saved = checkpoints(tmp_path / "whole" / "checkpoints")
    places = [json.loads((path / "trainer.json").read_text())["cursor"]["sources"]["data"] for path in saved]
    epoch_end = 1 + next(i for i, place in enumerate(places) if (place["epoch"], place["packs"]) == (1, 0))
    assert STEPS_PER_EPOCH_AT_LEAST <= epoch_end < last - 2
    assert (places[-1]["epoch"], places[-1]["packs"]) == (2, 0)

    # As if stopped after the epoch's last step: its checkpoint is the latest. Then with other numbers of workers.
    stopped = tmp_path / "stopped"
    shutil.copytree(saved[epoch_end - 1], stopped / "checkpoints" / saved[epoch_end - 1].name)
    train(
        config,
        stopped,
        f"train.max_steps={epoch_end + 1}",
        "train.num_train_epochs=null",
        "train.num_workers=2",
        "train.lr_scheduler_type=constant",
    )
    train(config, stopped, "train.num_workers=0", nproc=1)
    resumed = read_run(stopped, name="resumed", tolerance=float("inf"))
    _, differences = compare_runs(whole, [resumed], first_step=epoch_end + 1, last_step=last)
    assert differences == []
    assert sorted(resumed.records) == list(range(epoch_end + 1, last + 1))


def test_a_killed_run_goes_on_bit_by_bit(dataset_folder: Path, tokenizer: Path, s3: str, tmp_path: Path) -> None:
    from lmms_stream.mds.dataset import PackedStreamingDataset
    from lmms_stream.storage.storage import open_storage

    remote = f"{s3}/killed-run"
    for path in dataset_folder.rglob("*"):
        if path.is_file():
            open_storage(remote).upload(path, str(path.relative_to(dataset_folder)))
    assert len(PackedStreamingDataset(remote, tmp_path / "look")) > 0
    config = write_config(
        tmp_path / "run.yaml", Path("unused"), tokenizer, max_steps=6, save_steps=2, save_total_limit=2
    )
    settings = yaml.safe_load(config.read_text())
    settings["dataset"]["remote"] = remote
    config.write_text(yaml.safe_dump(settings))
    run_job(config, tmp_path / "whole", nproc=2, on_step=ignore)
    killed_at = run_job(config, tmp_path / "killed", nproc=2, on_step=ignore, kill_at=3)
    assert 3 <= killed_at < 6
    run_job(config, tmp_path / "killed", nproc=2, on_step=ignore)
    whole = read_run(tmp_path / "whole", name="whole", tolerance=0)
    resumed = read_run(tmp_path / "killed", name="resumed", tolerance=0)
    _, differences = compare_runs(whole, [resumed], first_step=1, last_step=6)
    assert differences == []
    assert len(read_log(tmp_path / "killed")) > 6 or killed_at % 2 == 0
    assert [path.name for path in checkpoints(tmp_path / "killed" / "checkpoints")] == [
        "step-00000004",
        "step-00000006",
    ]


def test_datasets_are_mixed_by_a_schedule_and_steps_skipped(
    dataset_folder: Path, tokenizer: Path, tmp_path: Path
) -> None:
    config = write_config(
        tmp_path / "run.yaml",
        dataset_folder,
        tokenizer,
        max_steps=4,
        num_workers=2,
        global_batch=8,
        save_steps=1,
        weights={0: {"one": 1, "two": 1}, 3: {"one": 3, "two": 1}},
        skip_steps=[[1, 3]],
    )
    settings = yaml.safe_load(config.read_text())
    one = settings.pop("dataset")
    settings["datasets"] = {"one": one, "two": one | {"seed": 5}}
    config.write_text(yaml.safe_dump(settings))
    train(config, tmp_path / "out")
    saved = checkpoints(tmp_path / "out" / "checkpoints")
    cursors = [json.loads((path / "trainer.json").read_text())["cursor"] for path in saved]
    assert [cursor["step"] for cursor in cursors] == [1, 4, 5, 6]
    packs = [{name: place["packs"] for name, place in cursor["sources"].items()} for cursor in cursors]
    assert packs == [{"one": a, "two": b} for a, b in ((4, 4), (18, 14), (24, 16), (30, 18))]
    ids = [record["sample_ids"] for record in read_log(tmp_path / "out")]
    assert all({sample.split(":")[0] for sample in step} == {"one", "two"} for step in ids)
    settings["dataset"] = one
    config.write_text(yaml.safe_dump(settings))
    result = run_command(*module_command(config), timeout_s=100)
    assert "error: " in result.stderr
    assert "a run needs exactly one of dataset and datasets" in result.stderr


def test_a_checkpoint_of_another_dataset_is_one_line_and_a_failure(
    dataset_folder: Path, tokenizer: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "run.yaml", dataset_folder, tokenizer, max_steps=1, num_workers=0)
    train(config, tmp_path / "out", nproc=1)
    command = torchrun_command(config, [f"train.output_dir={tmp_path / 'out'}", "dataset.seed=9"], nproc=1)
    result = run_command(*command, timeout_s=100)
    assert result.returncode != 0
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: the checkpoint follows plan ")
    assert "or start over in another output_dir" in line
    config.write_text(config.read_text().replace("num_canonical_nodes: 2", "num_canonical_nodes: 3"))
    with pytest.raises(TrainingError, match="the job ended with status 1: the checkpoint follows plan"):
        run_job(config, tmp_path / "out", nproc=1, on_step=ignore)


def test_settings_that_cannot_work_are_one_line_each(dataset_folder: Path, tokenizer: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yaml", dataset_folder, tokenizer, max_steps=1)
    for override, line in (
        ("train.lerning_rate=1", "unknown key 'train.lerning_rate': did you mean 'train.learning_rate'?"),
        ("dataset.packing_length=many", "dataset.packing_length: "),
        ("dataset.overlong=error", "are longer than packing_length 1024"),
        (
            "train.num_train_epochs=1",
            "train needs exactly one of max_steps, num_train_epochs and max_tokens, got max_steps and num_train",
        ),
        ("train.weights={other: 1}", "weights name 'other', the sources are data"),
        ("train.skip_steps=[[3, 2]]", "train.skip_steps must be ranges [first, stop), got [3, 2]"),
        ("train.global_batch=0", "train.global_batch must be at least 1, got 0"),
    ):
        result = run_command(*module_command(config, override), timeout_s=100)
        assert result.returncode == 1, result.stderr
        assert [text for text in result.stderr.splitlines() if text.startswith("error: ") and line in text], (
            result.stderr
        )


def module_command(config: Path, *overrides: str) -> list[str]:
    """One process, without torchrun."""
    command = torchrun_command(config, overrides, nproc=1)
    return [command[0], *command[command.index("lmms_stream.train") - 1 :]]


def test_a_comparison_finds_every_difference() -> None:
    def run(**changes: Any) -> Run:
        records = {step: {"sample_ids": [step], "loss": 1.0} for step in (1, 2, 3)}
        for step, change in changes.items():
            records[int(step[1:])] |= change
        return Run(name="run", records=records, tolerance=1e-3)

    assert compare_runs(run(), [run()], first_step=1, last_step=3)[1] == []
    assert compare_runs(run(), [run(_2={"loss": 1.0005})], first_step=1, last_step=3)[1] == []
    assert compare_runs(run(), [run(_2={"loss": 1.1})], first_step=1, last_step=3)[1] == [
        "step 2: the loss of run differs by 0.1"
    ]
    assert len(compare_runs(run(), [run(_2={"loss": float("nan")})], first_step=1, last_step=3)[1]) == 1
    assert compare_runs(run(), [run(_3={"sample_ids": [4]})], first_step=1, last_step=3)[1] == [
        "step 3: run read other samples"
    ]
    short = Run(name="short", records={1: run().records[1]}, tolerance=0)
    assert len(compare_runs(run(), [short], first_step=1, last_step=3)[1]) == 2
    for first, last in ((2, 1), (3, 4)):
        with pytest.raises(TrainingError, match="the log of run lacks steps"):
            compare_runs(run(), [run()], first_step=first, last_step=last)
