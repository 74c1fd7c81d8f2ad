"""Jobs on the CPU: uninterrupted against stopped and resumed, step by step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import yaml
from lmms_stream.train.checkpoint.checkpoint import checkpoints
from lmms_stream.train.report.train_log import read_log

from tests.conftest import last_words
from tests.rounds import in_long_rounds

from ..processes import run_module
from .launcher import run_job
from .runs import JOB_S, MODULE, differences, last_step, steps_of, train, write_chat_run

STEPS_PER_EPOCH_AT_LEAST = 3


def test_a_run_in_lanes_resumes_on_another_number_of_ranks(few_chats: Path, tokenizer: Path, tmp_path: Path) -> None:
    """Without a lengths index: the states of all ranks' lanes are in the checkpoint."""
    lanes = ["dataset.packing_mode=lanes", "dataset.num_canonical_nodes=4", "dataset.packing_window=32"]
    config = write_chat_run(tmp_path / "run.yaml", few_chats, tokenizer, max_steps=5, lr_scheduler_type="constant")
    train(config, tmp_path / "whole", *lanes)
    stopped = tmp_path / "stopped"
    train(config, stopped, *lanes, "train.max_steps=2")
    train(config, stopped, *lanes, nproc=1)
    assert differences(tmp_path / "whole", stopped, last_step=5, tolerance=1e-3) == []


@in_long_rounds
def test_resumes_give_the_run_that_was_never_interrupted(few_chats: Path, tokenizer: Path, tmp_path: Path) -> None:
    """Two epochs at once; against them: stopped after the first epoch's last step, resumed, and resumed again."""
    config = write_chat_run(tmp_path / "run.yaml", few_chats, tokenizer, num_train_epochs=2, save_steps=1)
    train(config, tmp_path / "whole")
    last = last_step(tmp_path / "whole")
    saved = checkpoints(tmp_path / "whole" / "checkpoints")
    states = [json.loads((path / "trainer.json").read_text())["cursor"]["sources"]["data"] for path in saved]
    epoch_end = 1 + next(i for i, state in enumerate(states) if (state["epoch"], state["packs"]) == (1, 0))
    assert STEPS_PER_EPOCH_AT_LEAST <= epoch_end < last - 2
    assert (states[-1]["epoch"], states[-1]["packs"]) == (2, 0)

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
    assert differences(tmp_path / "whole", stopped, first_step=epoch_end + 1, tolerance=float("inf")) == []
    assert steps_of(stopped) == list(range(epoch_end + 1, last + 1))


def test_datasets_are_mixed_by_a_schedule_and_steps_skipped(
    dataset_folder: Path, tokenizer: Path, tmp_path: Path
) -> None:
    config = write_chat_run(
        tmp_path / "run.yaml",
        dataset_folder,
        tokenizer,
        max_steps=4,
        num_workers=1,
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
    packs = [{name: state["packs"] for name, state in cursor["sources"].items()} for cursor in cursors]
    assert packs == [{"one": a, "two": b} for a, b in ((4, 4), (18, 14), (24, 16), (30, 18))]
    ids = [record["sample_ids"] for record in read_log(tmp_path / "out")]
    assert all({sample.split(":")[0] for sample in step} == {"one", "two"} for step in ids)
    settings["dataset"] = one
    config.write_text(yaml.safe_dump(settings))
    result = run_module(MODULE, str(config), timeout_s=JOB_S)
    assert "error: " in result.stderr
    assert "a run needs exactly one of dataset and datasets" in result.stderr


def test_a_checkpoint_of_another_dataset_is_one_line_and_a_failure(
    dataset_folder: Path, tokenizer: Path, tmp_path: Path
) -> None:
    config = write_chat_run(tmp_path / "run.yaml", dataset_folder, tokenizer, max_steps=1, num_workers=0)
    train(config, tmp_path / "out", nproc=1)
    output = f"train.output_dir={tmp_path / 'out'}"
    result = run_job(1, MODULE, str(config), output, "dataset.seed=9", timeout_s=JOB_S)
    assert result.returncode != 0
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: the checkpoint follows plan ")
    assert "or start over in another output_dir" in line


def test_settings_that_cannot_work_are_one_line_each(dataset_folder: Path, tokenizer: Path, tmp_path: Path) -> None:
    config = write_chat_run(tmp_path / "run.yaml", dataset_folder, tokenizer, max_steps=1)
    for override, line in (
        ("train.lerning_rate=1", "unknown key 'train.lerning_rate': did you mean 'train.learning_rate'?"),
        ("dataset.packing_length=many", "dataset.packing_length: "),
        ("dataset.overlong=error", "are longer than packing_length 1024"),
        (
            "train.max_steps=null",
            "train needs exactly one of max_steps, num_train_epochs and max_tokens",
        ),
        ("train.weights={other: 1}", "weights name 'other', the sources are data"),
        ("train.skip_steps=[[3, 2]]", "train.skip_steps must be ranges [first, stop), got [3, 2]"),
        ("train.global_batch=0", "train.global_batch must be at least 1, got 0"),
    ):
        result = run_module(MODULE, str(config), override, timeout_s=JOB_S)
        assert result.returncode == 1, last_words(result.stderr)
        assert [text for text in result.stderr.splitlines() if text.startswith("error: ") and line in text], (
            result.stderr
        )
