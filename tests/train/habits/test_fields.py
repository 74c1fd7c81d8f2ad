"""Fields of TrainingArguments that are no setting of a run: each does what its row in docs/arguments.md says."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lmms_stream import FSDP2SFTTrainer
from lmms_stream.errors import CheckpointError, ConfigError
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.run.distributed import end_distributed
from trl import SFTConfig

from . import rows


def trainer_of(model_folder: Path, args: Any) -> FSDP2SFTTrainer:
    return FSDP2SFTTrainer(str(model_folder), args, rows.chats(60))


@pytest.fixture
def _switches() -> Iterator[None]:
    """torch's switches and transformers' level of logs are of the whole process."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    level = transformers.utils.logging.get_verbosity()
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    transformers.utils.logging.set_verbosity(level)
    end_distributed()


@pytest.mark.usefixtures("_switches")
@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_is_torchs_switch_which_the_trainer_leaves_as_it_is(
    tf32: bool, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.training_args.is_torch_tf32_available", lambda: True)  # which asks for a GPU
    asked: list[bool] = []
    if hasattr(transformers.training_args, "enable_tf32"):
        monkeypatch.setattr("transformers.training_args.enable_tf32", asked.append)  # whose switch cannot be read back
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not tf32
    args = rows.config(tmp_path, tf32=tf32, packing=True, max_length=64, max_steps=1, save_strategy="no")
    trainer_of(model_folder, args).train()
    switches = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    assert (asked, switches) in [([tf32], (not tf32, not tf32)), ([], (tf32, tf32))]


class OfOther(SFTConfig):
    """Arguments as a rank has them that does not log."""

    @property
    def should_log(self) -> bool:
        return False


@pytest.mark.usefixtures("_switches")
@pytest.mark.parametrize(("kind", "level"), [(SFTConfig, logging.INFO), (OfOther, logging.CRITICAL)])
def test_log_level_replica_is_that_of_transformers_loggers_on_other_ranks(
    kind: Any, level: int, model_folder: Path, tmp_path: Path
) -> None:
    args = kind(
        str(tmp_path), use_cpu=True, bf16=False, report_to="none", log_level="info", log_level_replica="critical"
    )
    rows.resolved(model=str(model_folder), args=args, train_dataset=rows.chats(4))
    assert transformers.utils.logging.get_verbosity() == level


@pytest.mark.usefixtures("_switches")
def test_use_cpu_runs_on_the_cpu_and_is_refused_by_a_process_that_sees_a_gpu(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = rows.config(tmp_path, packing=True, max_length=64, max_steps=1, use_cpu=True)
    if not torch.cuda.is_available():
        assert trainer_of(model_folder, args).device == torch.device("cpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"use_cpu is True, and .* GPU: start the script"):
        rows.resolved(model=str(model_folder), args=args, train_dataset=rows.chats(60))


@pytest.mark.usefixtures("_switches")
def test_resume_from_checkpoint_is_for_the_script_that_passes_it_on(model_folder: Path, tmp_path: Path) -> None:
    def args(steps: int, **more: Any) -> SFTConfig:
        options = {"max_steps": steps, "logging_steps": 1, "save_steps": 1, "lr_scheduler_type": "constant", **more}
        return rows.config(tmp_path, packing=True, max_length=64, **options)

    trainer_of(model_folder, args(2)).train()
    first = tmp_path / "checkpoints" / "step-00000001"
    given = args(3, resume_from_checkpoint=str(first))
    with pytest.raises(CheckpointError, match=r"call train\(resume_from_checkpoint=True\), to resume from it"):
        trainer_of(model_folder, given).train()
    trainer = trainer_of(model_folder, given)
    assert trainer.train(resume_from_checkpoint=given.resume_from_checkpoint).global_step == 3
    records = read_log(tmp_path)
    assert [record["step"] for record in records] == [1, 2, 2, 3]  # it goes on from the first
    assert records[1]["loss"] == records[2]["loss"]
