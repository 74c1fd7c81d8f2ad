"""Runs that cannot be, in this process alone: each ends with an error that names the value, the rule and the remedy."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.config import load_config
from lmms_stream.errors import CheckpointError, ConfigError, StorageError
from lmms_stream.train.checkpoint.checkpoint import checkpoints
from lmms_stream.train.loop import StoppedError
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.run_config import RunConfig
from transformers import TrainerCallback

from ..conftest import write_tokens
from ..mds.test_disk_faults import small_disk
from .runs import trainer_of, write_small_run


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refused")
    write_tokens(folder / "data", num_samples=300)  # of token ids to 299
    return write_small_run(folder / "run.yaml", folder / "data", eval_dataset={"shuffle": False}, max_steps=4)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lerning_rate=1", "unknown key 'train.lerning_rate': did you mean 'train.learning_rate'?"),
        ("evaldataset.remote=x", "unknown key 'evaldataset': did you mean 'eval_dataset'?"),
        ("train.num_train_epochs=1", "train needs exactly one of max_steps, num_train_epochs and max_tokens, got max"),
        (
            "train.max_tokens=1000",
            "train needs exactly one of max_steps, num_train_epochs and max_tokens, got max_step",
        ),
        ("train.max_steps=null", "train needs exactly one of max_steps, num_train_epochs and max_tokens"),
        ("model.dtype=float16", "model.dtype: Input should be 'float32' or 'bfloat16', got 'float16'"),
        ("train.bf16=fp8", "train.bf16: Input should be a valid boolean, unable to interpret input, got 'fp8'"),
        ("train.learning_rate=-1", "train.learning_rate must be 0 or more, got -1.0"),
        ("train.sequence_parallel=0", "train.sequence_parallel must be at least 1, got 0"),
        ("train.expert_parallel=0", "train.expert_parallel must be at least 1, got 0"),
        ("train.tensor_parallel=0", "train.tensor_parallel must be at least 1, got 0"),
        ("model.pretrained=gpt2", "model needs exactly one of pretrained and config"),
        ("dataset=null", "a run needs exactly one of dataset and datasets"),
    ],
)
def test_settings_that_cannot_be_are_one_line_with_the_file(config: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{config}: {message}")):
        load_config(RunConfig, config, [override])


def test_evaluations_without_data_for_them_are_refused(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.eval_steps needs an eval_dataset: name one, or set eval_steps to 0"):
        load_config(RunConfig, config, ["train.eval_steps=2", "eval_dataset=null"])


@pytest.mark.parametrize(("source", "vocab_size"), [("data", 100), ("eval_dataset", 299)])
def test_a_token_that_the_model_does_not_have_is_named_with_its_sample(
    config: Path, tmp_path: Path, source: str, vocab_size: int
) -> None:
    """Sample n is its number, again and again. The last is not in the first step, and in every evaluation."""
    overrides = [f"train.output_dir={tmp_path}", f"model.config.vocab_size={vocab_size}", "train.eval_steps=1"]
    message = rf"token id (\d+) in sample \1 of {source} is none of the model's {vocab_size}: take the model's own tok"
    with pytest.raises(ConfigError, match=message):
        trainer_of(config, *overrides).train()


def test_a_checkpoint_to_resume_from_that_is_missing_or_damaged_is_named(config: Path, tmp_path: Path) -> None:
    overrides = [f"train.output_dir={tmp_path}", "eval_dataset=null", "train.max_steps=2"]
    missing = tmp_path / "checkpoints" / "step-00000002"
    with pytest.raises(CheckpointError, match=f"^{missing} is no complete checkpoint: name one "):
        trainer_of(config, *overrides, f"train.resume={missing}").train()
    trainer_of(config, *overrides).train()
    (missing / "__0_0.distcp").write_bytes(b"")
    for choice in ("auto", str(missing)):
        with pytest.raises(CheckpointError, match=f"{missing}/__0_0.distcp has 0 of "):
            trainer_of(config, *overrides, f"train.resume={choice}").train()


def test_a_run_that_goes_on_from_a_named_checkpoint_says_what_a_later_resume_takes(
    config: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoints behind the named one stay, and the same command would begin at that again."""
    overrides = [f"train.output_dir={tmp_path}", "eval_dataset=null", "train.save_steps=1"]
    found = []

    class Looks(TrainerCallback):
        def on_save(self, *_: Any, **__: Any) -> None:
            found.append(len(checkpoints(tmp_path / "checkpoints")))

    trainer_of(config, *overrides, callbacks=[Looks]).train()
    assert found == [1, 2, 3, 4], "a save is told before it is whole"
    first, *_, last = checkpoints(tmp_path / "checkpoints")

    class Told(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(StoppedError, match=rf"step 3 is saved, resume from it with train.resume={tmp_path}.*00000003"):
        trainer_of(config, *overrides, f"train.resume={first}", callbacks=[Told]).train()
    assert "has checkpoints of later steps (2, 3, 4), and train.resume auto takes the latest" in caplog.text
    caplog.clear()
    with pytest.raises(StoppedError, match=r"the same command resumes from it$"):
        trainer_of(config, f"train.output_dir={tmp_path / 'b'}", "eval_dataset=null", callbacks=[Told]).train()
    trainer_of(config, *overrides, f"train.resume={last}").train()
    assert "later steps" not in caplog.text


def test_a_disk_that_fills_up_ends_a_run_after_its_last_whole_checkpoint(config: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, num_bytes=1_600_000) as limit:
        if limit is not None:
            pytest.skip("mounting a small file system is not allowed here")
        saved = disk / "checkpoints"
        overrides = [f"train.output_dir={tmp_path / 'out'}", "eval_dataset=null", "train.save_steps=1"]
        with pytest.raises(CheckpointError) as caught:
            trainer_of(config, *overrides, f"train.checkpoint_dir={saved}").train()
        *_, last = checkpoints(saved)
        assert re.match(
            rf"checkpoint {saved}/step-0*{int(last.name[-8:]) + 1} was not saved; earlier checkpoints are unchanged: "
            r"no room on the disk of .*: free some, lower save_total_limit, or name another checkpoint_dir",
            str(caught.value),
        )
        known = {"log", ".run.lock", *(path.name for path in checkpoints(saved))}
        assert {path.name for path in saved.iterdir()} == known
        overrides += [f"train.checkpoint_dir={tmp_path / 'elsewhere'}", f"train.resume={last}"]
        trainer_of(config, *overrides).train()
        assert read_log(tmp_path / "out")[-1]["step"] == 4


def test_a_log_that_cannot_be_written_is_an_error_that_names_it(config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(
        StorageError, match=r"file/out/train_log.jsonl: Not a directory: .*: check the path and its rights"
    ):
        trainer_of(config, f"train.output_dir={tmp_path / 'file' / 'out'}").train()
    disk = tmp_path / "disk"
    with small_disk(disk, num_bytes=1 << 16) as limit:
        if limit is not None:
            pytest.skip("mounting a small file system is not allowed here")
        with (disk / "filler").open("wb", buffering=0) as filler:
            while filler.tell() < 1 << 16:
                filler.write(bytes(1 << 12))
        overrides = [f"train.output_dir={disk}", f"train.checkpoint_dir={tmp_path / 'checkpoints'}"]
        with pytest.raises(StorageError, match=r"(\.jsonl|\.bin|_checkpoint_dir): no room on the disk of this node"):
            trainer_of(config, *overrides).train()
