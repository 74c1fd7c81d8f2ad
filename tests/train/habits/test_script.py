"""A script for TRL's trainer runs with ours; on the same batches loss and gradients are transformers'."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from lmms_stream import FSDP2SFTTrainer
from lmms_stream.errors import CheckpointError
from lmms_stream.train.report.train_log import read_log
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import SFTTrainer

from ...conftest import last_words
from ...jobs.launcher import run_job
from ...rounds import in_long_rounds
from . import rows
from .script_job import right

OPTIONS = {"max_steps": 3, "logging_steps": 1, "learning_rate": 1e-2, "save_strategy": "no"}


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_log(folder) if "loss" in record]


def test_a_script_of_trl_runs_on_two_ranks_as_on_one(model_folder: Path, tmp_path: Path) -> None:
    folders = {ranks: tmp_path / str(ranks) for ranks in (1, 2)}
    options = json.dumps({**OPTIONS, "per_device_train_batch_size": 2})
    done = run_job(
        2, "tests.train.habits.script_job", str(model_folder), str(folders[2]), options, timeout_s=120
    )  # fmt: skip
    assert done.returncode == 0, last_words(done.stderr)
    of_ranks = [json.loads((folders[2] / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [each["ranks"] for each in of_ranks] == [2, 2]
    assert all(each["had_group"] for each in of_ranks), "transformers' arguments make it, as under torchrun"
    assert len({each["loss"] for each in of_ranks}) == 1
    assert len({each["eval"]["eval_loss"] for each in of_ranks}) == 1
    assert [each["by_hand"] for each in read_log(folders[2]) if "by_hand" in each] == [1, 2, 3]
    assert done.stderr.count("converting train_dataset (60 rows) once") == 1
    saved = AutoModelForCausalLM.from_pretrained(folders[2])
    assert AutoTokenizer.from_pretrained(folders[2]).chat_template
    assert saved.config.pad_token_id == 0
    figures = of_ranks[0]["eval"]
    assert 0 <= figures["eval_right"] <= 1

    args = rows.config(folders[1], packing=True, max_length=64, per_device_train_batch_size=4, **OPTIONS)
    trainer = FSDP2SFTTrainer(
        str(model_folder), args, rows.chats(60), rows.chats(6), compute_metrics=right,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )  # fmt: skip
    trainer.train()
    assert figures == pytest.approx(trainer.evaluate(), rel=1e-5)
    one, two = losses(folders[1]), losses(folders[2])
    assert len(one) == 3
    assert one == pytest.approx(two, rel=1e-5)
    assert one[-1] < one[0]


def test_the_example_is_a_script_of_trl_with_another_import() -> None:
    text = (Path(__file__).parents[3] / "examples" / "trl_sft.py").read_text()
    line = r"from lmms_stream.trl import SFTConfig, SFTTrainer  # instead of: (.*)\n"
    (theirs,) = re.findall(line, text)
    assert theirs == "from trl import SFTConfig, SFTTrainer"
    assert text.count("lmms_stream") == 1


class Gradients(TrainerCallback):
    """What the optimizer is given, of the first step: the same callback in either trainer."""

    def __init__(self) -> None:
        self.of: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            self.of[name] = whole.clone()


def plain_trainer(model_folder: Path, dataset: Dataset, folder: Path, callback: TrainerCallback) -> Trainer:
    """transformers' Trainer, which pads the samples of a batch."""
    tok = AutoTokenizer.from_pretrained(model_folder)
    args = TrainingArguments(
        str(folder), max_steps=1, logging_steps=1, per_device_train_batch_size=len(dataset), max_grad_norm=0.0,
        use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    made: Trainer = Trainer(model, args, DataCollatorForSeq2Seq(tok), dataset, callbacks=[callback])
    return made


@pytest.mark.filterwarnings("ignore")  # transformers'
@pytest.mark.parametrize(
    ("make", "options"),
    [
        pytest.param(rows.chats, {"assistant_only_loss": True, "max_length": 64}, id="chats"),
        pytest.param(rows.prompts, {"max_length": 40}, id="prompts", marks=in_long_rounds),
    ],
)
def test_loss_and_gradients_are_those_of_transformers_without_packing(
    make: Callable[[int], Dataset], options: dict[str, Any], model_folder: Path, tmp_path: Path
) -> None:
    dataset, ours, theirs = make(12), Gradients(), Gradients()
    trainer = FSDP2SFTTrainer(
        str(model_folder),
        rows.config(
            tmp_path / "ours", packing=True, max_steps=1, logging_steps=1, max_grad_norm=0.0,
            per_device_train_batch_size=2, gradient_accumulation_steps=8, save_strategy="no", **options,
        ),
        dataset,
        callbacks=[ours],
    )  # fmt: skip
    assert 4 < (trainer.loader.packs_left or 0) <= 16
    trainer.train()
    trained_on: Any = trainer.data.train_dataset
    same = [{"input_ids": ids, "labels": labels} for ids, labels in rows.tokens_of(trained_on)]
    plain = plain_trainer(model_folder, Dataset.from_list(same), tmp_path / "theirs", theirs)
    plain.train()
    (loss,) = [record["loss"] for record in read_log(tmp_path / "ours")]
    assert loss == pytest.approx(plain.state.log_history[0]["loss"], rel=1e-4)  # which rounds its figure
    assert loss == pytest.approx(plain.state.log_history[1]["train_loss"], rel=1e-5)
    assert ours.of.keys() == theirs.of.keys()
    for name, gradient in theirs.of.items():
        torch.testing.assert_close(ours.of[name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()))


@pytest.mark.filterwarnings("ignore")  # TRL's and transformers'
def test_two_steps_of_packs_move_the_weights_as_trl_does(
    model_folder: Path, tok: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """TRL without packing, all samples a batch, in each of two steps; ours in packs."""
    options = {
        "max_steps": 2, "learning_rate": 1e-2, "max_length": 64, "assistant_only_loss": True, "save_strategy": "no",
        "optim": "sgd", "lr_scheduler_type": "constant", "disable_tqdm": True, "max_grad_norm": 0.0,
    }  # fmt: skip
    weights = []
    for kind, more in (
        (SFTTrainer, {"per_device_train_batch_size": 12}),
        (FSDP2SFTTrainer, {"packing": True, "per_device_train_batch_size": 8}),
    ):
        trainer: Any = kind(
            model=AutoModelForCausalLM.from_pretrained(model_folder),
            args=rows.config(tmp_path / kind.__name__, **options, **more),
            train_dataset=rows.chats(12),
            processing_class=tok,
        )
        trainer.train()
        trainer.save_model(str(tmp_path / "saved" / kind.__name__))
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / kind.__name__)
        weights.append(dict(saved.named_parameters()))
    theirs, ours = weights
    before = dict(AutoModelForCausalLM.from_pretrained(model_folder).named_parameters())
    for name, parameter in theirs.items():
        torch.testing.assert_close(ours[name], parameter, rtol=1e-5, atol=1e-6)
        assert not torch.equal(parameter, before[name]), name


def test_a_second_run_goes_on_only_where_it_is_asked_to(model_folder: Path, tmp_path: Path) -> None:
    def trainer(steps: int) -> FSDP2SFTTrainer:
        args = rows.config(tmp_path, packing=True, max_length=64, max_steps=steps, lr_scheduler_type="constant")
        return FSDP2SFTTrainer(str(model_folder), args, rows.chats(60))

    trainer(2).train()
    with pytest.raises(CheckpointError, match=r"call train\(resume_from_checkpoint=True\), to resume from it"):
        trainer(3).train()
    assert trainer(3).train(resume_from_checkpoint=True).global_step == 3


def test_a_collator_of_transformers_trains_as_none_does(model_folder: Path, tmp_path: Path) -> None:
    made = []
    for collator in (None, DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(model_folder))):
        folder = tmp_path / str(collator is None)
        args = rows.config(folder, max_length=64, max_steps=2, logging_steps=1, save_strategy="no")
        FSDP2SFTTrainer(str(model_folder), args, rows.chats(20), data_collator=collator).train()
        made.append(losses(folder))
    assert made[0] == made[1]


def test_the_best_model_is_loaded_at_the_end(model_folder: Path, tmp_path: Path) -> None:
    args = rows.config(
        tmp_path, packing=True, max_length=64, max_steps=4, learning_rate=1e-2, eval_strategy="steps", eval_steps=2,
        save_steps=2, load_best_model_at_end=True,
    )  # fmt: skip
    trainer = FSDP2SFTTrainer(str(model_folder), args, rows.chats(60), rows.chats(5))
    trainer.train()
    evaluated = [record["eval_loss"] for record in read_log(tmp_path) if "eval_loss" in record]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(evaluated), rel=1e-6)
