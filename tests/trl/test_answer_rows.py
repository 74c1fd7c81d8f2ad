"""Tokens of rows with answers to compare, and steps on them, are those of the installed TRL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trl
from datasets import Dataset
from lmms_stream.doors.trl import DPOTrainer, KTOTrainer
from lmms_stream.errors import ConfigError, LmmsStreamError
from lmms_stream.train.report.train_log import read_log
from lmms_stream.types import Role
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from ..versions import IS_5
from . import rows

Make = Callable[[], Dataset]
OURS: dict[str, Any] = {"DPO": DPOTrainer, "KTO": KTOTrainer}
CASES: dict[str, tuple[str, Make, dict[str, Any]]] = {
    "pairs of texts": ("DPO", rows.text_pairs, {}),
    "pairs of whole texts": ("DPO", rows.whole_text_pairs, {}),
    "pairs of messages": ("DPO", rows.chat_pairs, {}),
    "pairs of whole conversations": ("DPO", rows.whole_pairs, {}),
    "pairs that are cut": ("DPO", rows.chat_pairs, {"max_length": 14}),
    "pairs of which some prompts fill what is left": ("DPO", rows.growing_pairs, {"max_length": 24}),
    "answers": ("KTO", rows.judged, {}),
    "answers of texts": ("KTO", rows.judged_texts, {}),
    "answers that are cut": ("KTO", rows.judged, {"max_length": 14}),
    "answers of pairs": ("KTO", rows.whole_pairs, {}),
}


def arguments(kind: str, folder: Path, **options: Any) -> Any:
    given = {"use_cpu": True, "bf16": False, "report_to": "none", "gradient_checkpointing": False, **options}
    return getattr(trl, f"{kind}Config")(str(folder), per_device_train_batch_size=4, **given)


def trainers(kind: str, folder: Path, dataset: Dataset, model_folder: Path, tok: Any, **options: Any) -> list[Any]:
    """Ours and TRL's of the same arguments."""
    return [
        made(
            AutoModelForCausalLM.from_pretrained(model_folder),
            args=arguments(kind, folder / made.__module__, **options),
            train_dataset=dataset,
            processing_class=tok,
        )
        for made in (OURS[kind], getattr(trl, f"{kind}Trainer"))
    ]


def answers_of(trainer: Any) -> list[list[tuple[list[int], int, int]]]:
    """Of each sample that we store, of each of its answers: tokens, how many of them are the prompt, role."""
    dataset, found = trainer.train_dataset, []
    for sample in dataset.read(np.arange(dataset.num_samples)):
        made, start, answers = dataset.processor.process(sample), 0, []
        for length, role in made["sequences"].tolist():
            ids, labels = (made[name][start : start + length].tolist() for name in ("input_ids", "labels"))
            num_prompt = labels.count(-100)
            assert labels == [-100] * num_prompt + ids[num_prompt:]
            answers.append((ids, num_prompt, role))
            start += length
        found.append(answers)
    return found


def answers_of_trl(trainer: Any, max_length: int) -> list[list[tuple[list[int], int, int]]]:
    found: list[list[tuple[list[int], int, int]]] = []
    for row in trainer.train_dataset:
        prompt = row["prompt_ids"]
        if "chosen_ids" in row:
            answers = [(row["chosen_ids"], Role.CHOSEN), (row["rejected_ids"], Role.REJECTED)]
        else:
            answers = [(row["completion_ids"], Role(int(row["label"])))]
        found.append([((prompt + ids)[:max_length], len(prompt), role) for ids, role in answers])
    return found


@pytest.mark.filterwarnings("ignore")  # of TRL and transformers
@pytest.mark.parametrize("name", CASES)
def test_rows_become_the_answers_that_trl_makes(
    name: str, tok: PreTrainedTokenizerFast, model_folder: Path, tmp_path: Path
) -> None:
    kind, make, options = CASES[name]
    ours, theirs = trainers(kind, tmp_path, make(), model_folder, tok, **options)
    made = answers_of(ours)
    assert made == answers_of_trl(theirs, options.get("max_length", 1024))
    assert 2 < len(made) <= (16 if name == "answers of pairs" else 8)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind", [pytest.param("DPO", marks=pytest.mark.skipif(not IS_5, reason="it has no order of rows")), "KTO"]
)
def test_steps_are_those_of_trl(kind: str, tok: PreTrainedTokenizerFast, model_folder: Path, tmp_path: Path) -> None:
    """Batches in the order of the rows: TRL's own order for KTO."""
    options = {
        "max_steps": 3, "learning_rate": 1e-2, "optim": "sgd", "lr_scheduler_type": "constant", "logging_steps": 1,
        "save_strategy": "no", "max_grad_norm": 0.0, "disable_tqdm": True, "train_sampling_strategy": "sequential",
    }  # fmt: skip
    make = rows.chat_pairs if kind == "DPO" else rows.judged
    ours, theirs = trainers(kind, tmp_path, make(), model_folder, tok, **options)
    ours.train()
    theirs.train()
    found = [each["loss"] for each in read_log(ours.output_dir) if "loss" in each]
    expected = [each["loss"] for each in theirs.state.log_history if "loss" in each]
    assert len(expected) == 3
    assert found == pytest.approx(expected, abs=1e-4)  # which TRL rounds
    ours.save_model(str(tmp_path / "saved"))
    saved = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "saved").named_parameters())
    for name, parameter in theirs.model.named_parameters():
        assert (saved[name] - parameter).abs().max() < 1e-6, name


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "several losses": ("DPO", {"loss_type": ["sigmoid", "ipo"]}, "loss_type is sigmoid, ipo, but only one loss"),
    "another loss": ("DPO", {"loss_type": ["nca_pair"]}, "has no loss_type 'nca_pair'"),
    "a moving reference": ("DPO", {"sync_ref_model": True}, "args.sync_ref_model is True, which is not supported"),
    "weights of answers": ("DPO", {"use_weighting": True}, "args.use_weighting is True, which is not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_cannot_be_kept_are_refused(name: str, model_folder: Path, tmp_path: Path) -> None:
    kind, options, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        OURS[kind](str(model_folder), args=arguments(kind, tmp_path, **options), train_dataset=rows.chat_pairs())


def test_a_reference_must_have_the_weights_that_the_run_begins_with(model_folder: Path, tmp_path: Path) -> None:
    model, other = (AutoModelForCausalLM.from_pretrained(model_folder) for _ in range(2))
    args, dataset = arguments("DPO", tmp_path), rows.chat_pairs()
    DPOTrainer(model, other, args=args, train_dataset=dataset)
    other.lm_head.weight.data[0] += 1
    with pytest.raises(ConfigError, match=r"ref_model has another lm_head.weight than model: the reference is"):
        DPOTrainer(model, other, args=args, train_dataset=dataset)
    for ref_model, message in (("elsewhere", "ref_model is elsewhere, and model /"), (other, "ref_model is a Llama")):
        with pytest.raises(ConfigError, match=message):
            DPOTrainer(str(model_folder), ref_model, args=args, train_dataset=dataset)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, "columns messages, and DPO compares answers: they are to"),
        ({"prompt": "x", "chosen": "y", "rejected": [{"role": "assistant", "content": "y"}]}, "must all be texts"),
        ({"chosen": "abc", "rejected": "xyz"}, "chosen and rejected begin differently, and there is no prompt"),
        ({"prompt": "x", "chosen": ["y"], "rejected": ["z"]}, "an answer is .*: give a text or messages"),
    ],
)
def test_rows_without_answers_to_compare_are_refused(
    row: dict[str, Any], message: str, model_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(LmmsStreamError, match=message):
        DPOTrainer(str(model_folder), args=arguments("DPO", tmp_path), train_dataset=Dataset.from_list([row]))
