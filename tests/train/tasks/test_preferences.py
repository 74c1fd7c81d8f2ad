"""DPO and KTO on packs: TRL's losses and gradients, whatever lies beside an answer; rewards that rise."""

from __future__ import annotations

import logging
import shutil
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.doors.huggingface.collators import CollatorAdapter
from lmms_stream.errors import CheckpointError, ConfigError, DataError
from lmms_stream.loader.collate import collate, join
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.plan.packing import Overlong
from lmms_stream.plugins.tasks.dpo import DPO
from lmms_stream.plugins.tasks.kto import KTO, mismatched
from lmms_stream.storage.storage import open_storage
from lmms_stream.train.inputs import Functions
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.tasks.causal import CausalLanguageModelling
from lmms_stream.train.tasks.preference import StepPasses
from lmms_stream.train.tasks.reference import StoredReference, folder_of
from lmms_stream.train.tasks.registry import build_task
from transformers import DataCollatorWithFlattening

from ...conftest import write_tokens
from ..answers import (
    MODEL,
    TRAINED,
    AnswersProcessor,
    Step,
    dataset_of,
    one_step,
    pairs,
    single_answers,
    trainer_of,
    write_answers,
)
from ..runs import trainer_of as trainer_of_run
from ..runs import write_run
from ..trl_answers import trl_step

ROWS, SINGLES = pairs(12), single_answers(12)
DPO_CASES: list[dict[str, Any]] = [
    {}, {"loss_type": "ipo", "beta": 0.3}, {"loss_type": "hinge", "beta": 0.05},
    {"loss_type": "robust", "label_smoothing": 0.1},
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("answers")
    write_answers(found / "data", ROWS)
    write_answers(found / "kto", SINGLES)
    return found


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Of the gradients of any parameter, as a share of its largest."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in theirs)


def assert_same(step: Step, loss: float, gradients: dict[str, torch.Tensor], figures: dict[str, float]) -> None:
    assert step.figures["loss"] == pytest.approx(loss, rel=1e-5)
    assert largest_difference(step.gradients, gradients) < 1e-5
    rewards = {name: value for name, value in step.figures.items() if name != "loss"}
    assert rewards == pytest.approx({name: figures[name] for name in rewards}, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("settings", DPO_CASES, ids=lambda settings: settings.get("loss_type", "sigmoid"))
def test_dpo_is_that_of_trl_packed_and_unpacked(folder: Path, settings: dict[str, Any]) -> None:
    """Several pairs in a pack, two packs in one forward pass with padding between them; and a pack for each pair."""
    expected = trl_step("DPO", ROWS, **settings)
    packed = trainer_of(folder, DPO(**settings), global_batch=4, per_device_batch=2, pad_to=140)
    assert_same(one_step(packed), *expected)
    alone = trainer_of(folder, DPO(**settings), train_dataset=dataset_of(folder / "data", most=1), global_batch=12)
    assert_same(one_step(alone), *expected)


@pytest.mark.parametrize(
    "settings", [{"desirable_weight": 1.3, "beta": 0.2}, {"loss_type": "apo_zero_unpaired", "undesirable_weight": 0.7}]
)
def test_kto_is_that_of_trl(folder: Path, settings: dict[str, Any]) -> None:
    """A pack is a batch of TRL's: in its order each prompt has the answer of the one before, to estimate kl."""
    dataset = dataset_of(folder / "kto", objective="kto", packing_length=256)
    step = one_step(trainer_of(folder, KTO(**settings), train_dataset=dataset, global_batch=1))
    rows = [SINGLES[number] for number in step.sample_ids]
    assert len(rows) > 3
    loss, gradients, figures = trl_step("KTO", rows, **settings)
    assert_same(step, loss, gradients, figures)
    assert ("kl" in step.figures) == ("loss_type" not in settings)
    assert step.figures.get("kl", 1.0) > 0


def test_answers_stand_behind_the_prompt_before_them_to_estimate_kl() -> None:
    def answer(prompt: list[int], tokens: list[int], role: int) -> dict[str, Any]:
        ids = np.array(prompt + tokens)
        labels = np.array([-100] * len(prompt) + tokens)
        return {"input_ids": ids, "labels": labels, "sequences": np.array([[len(ids), role]])}

    pack = collate([answer([1], [2, 3], 1), answer([4, 5], [6], 0), answer([7], [8, 9, 9], 1)], [0, 1, 2], pad_to=12)
    made = mismatched(pack)
    assert made.input_ids.tolist() == [[1, 8, 9, 9, 4, 5, 2, 3, 7, 6, 0, 0]]
    assert made.labels.tolist() == [[-100, 8, 9, 9, -100, -100, 2, 3, -100, 6, -100, -100]]
    assert made.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 0, 1]]
    assert made.cu_seqlens.tolist() == [0, 4, 8, 10, 12]
    assert made.sequences is not None
    assert made.sequences[:, 1:3].tolist() == [[0, 4], [4, 8], [8, 10]]
    assert (made.max_seqlen, made.num_loss_tokens) == (4, pack.num_loss_tokens)
    assert mismatched(collate([answer([1], [2], 1)], [0])).input_ids.tolist() == [[1, 2]]


def test_a_small_run_prefers_the_chosen_answers(folder: Path, tmp_path: Path) -> None:
    """The processor says what is learnt; its rewards begin at 0, as the model begins as its reference."""
    trainer = trainer_of(
        folder, output_dir=str(tmp_path), num_train_epochs=12, max_steps=None, learning_rate=3e-3,
        eval_dataset=dataset_of(folder / "data"),
    )  # fmt: skip
    assert isinstance(trainer.task, DPO)
    trainer.train()
    first, *_, last = [record for record in read_log(tmp_path) if "loss" in record]
    assert (first["loss"], first["rewards/margins"]) == (pytest.approx(np.log(2)), 0)
    assert last["rewards/margins"] > 0.5
    assert last["rewards/chosen"] > 0 > last["rewards/rejected"]
    assert last["rewards/accuracies"] == 1
    evaluated = trainer.evaluate()
    assert evaluated["eval_rewards/accuracies"] == 1
    assert evaluated["eval_loss"] == pytest.approx(float(np.log1p(np.exp(-evaluated["eval_rewards/margins"]))), abs=0.2)


def test_an_adapter_is_compared_with_the_weights_under_it(folder: Path) -> None:
    lora = ModelConfig(config=MODEL, adapter={"r": 4, "target_modules": "all-linear", "lora_dropout": 0.0})
    trainer = trainer_of(folder, DPO(), model=lora)
    trainer.build()
    reference = trainer.reference
    assert reference is not None
    packs = next(trainer.data.steps_of(iter(trainer.loader)))
    passes = StepPasses([[pack] for pack in packs], joined=join, device=torch.device("cpu"))
    before = reference.log_probs(passes)
    with torch.no_grad():
        for name, parameter in trainer.model.model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    after, trained = reference.log_probs(passes), -trainer.model(packs[0]).tokens.detach().sum()
    assert all(torch.equal(before[number], after[number]) for number in before)
    assert float(trained) != pytest.approx(float(before[0].sum()), rel=1e-3)
    with pytest.raises(ConfigError, match="the adapter's init_lora_weights 'pissa' changes the base weights"):
        trainer_of(folder, DPO(), model=ModelConfig(config=MODEL, adapter={"r": 4, "init_lora_weights": "pissa",
                   "target_modules": "all-linear"})).build()  # fmt: skip


def test_a_stored_reference_is_measured_once_and_gives_the_same_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_answers(tmp_path / "data", ROWS)
    of_model = one_step(trainer_of(tmp_path, DPO()))
    with caplog.at_level(logging.INFO):
        stored = [one_step(trainer_of(tmp_path, DPO(reference="stored"))) for _ in range(2)]
    said = [record.getMessage() for record in caplog.records if "measuring" in record.getMessage()]
    (path,) = (tmp_path / "data" / "_lmms" / "reference").glob("*.npy")
    assert said == [f"measuring 12 samples by the reference's weights, kept at {path}"]
    values = np.load(path)
    assert (values.shape, values.dtype) == ((12, 2), np.float32)
    for step in stored:
        assert step.figures == pytest.approx(of_model.figures, rel=1e-5, abs=1e-6)
        assert largest_difference(step.gradients, of_model.gradients) < 1e-5
    np.save(path, values + 1)
    with pytest.raises(CheckpointError, match=r"cannot be used \(its values are not those that were written\): remove"):
        trainer_of(tmp_path, DPO(reference="stored")).build()


def test_a_measurement_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    """What a run that was killed has kept is not measured again."""
    data = dataset_of(write_answers(tmp_path / "data", ROWS), most=1)
    trainer_of(tmp_path, DPO(reference="stored"), train_dataset=data).build()
    (path,) = (tmp_path / "data" / "_lmms" / "reference").glob("*.npy")
    whole = np.load(path)
    part = np.full_like(whole, np.nan)
    part[4] = [-7, -8]
    np.save(path.with_suffix(".part.npy"), part)
    path.unlink()
    path.with_suffix(".json").unlink()
    trainer_of(tmp_path, DPO(reference="stored"), train_dataset=data).build()
    made = np.load(path)
    assert made[4].tolist() == [-7, -8]
    assert np.delete(made, 4, axis=0).tolist() == np.delete(whole, 4, axis=0).tolist()


def test_a_stored_reference_of_other_answers_of_the_same_lengths_is_measured(tmp_path: Path) -> None:
    swapped = [row._replace(answers=row.answers[::-1]) for row in ROWS]
    write_answers(tmp_path / "data", ROWS)
    write_answers(tmp_path / "swapped", swapped)
    for name in ("data", "swapped"):
        data = dataset_of(tmp_path / name, most=1)
        trainer_of(tmp_path, DPO(reference="stored"), train_dataset=data).build()
        if name == "data":
            shutil.copytree(tmp_path / "data" / "_lmms" / "reference", tmp_path / "swapped" / "_lmms" / "reference")
    first, second = (np.load(path) for path in (tmp_path / "swapped" / "_lmms" / "reference").glob("*.npy"))
    assert first == pytest.approx(second[:, ::-1], rel=1e-5)


def test_a_stored_reference_is_kept_with_the_run_where_its_dataset_is_in_a_store(tmp_path: Path) -> None:
    in_store, beside = open_storage("s3://bucket/pairs"), open_storage(str(tmp_path))
    assert folder_of(in_store, output_dir=tmp_path / "run") == tmp_path / "run" / "reference"
    assert folder_of(beside, output_dir=tmp_path / "run") == tmp_path / "_lmms" / "reference"


def test_samples_that_were_not_measured_are_named() -> None:
    values = np.array([[-1.0, -2.0], [np.nan, np.nan]], np.float32)
    reference = StoredReference({"data": values}, digest="")
    pair = AnswersProcessor().process(
        {"input_ids": np.arange(5), "prompts": np.array([1, 1]), "sequences": np.array([[3, 1], [2, 0]])}
    )

    def log_probs(sample_id: int, source: str) -> list[float]:
        pack = collate([pair], [sample_id], source=source)
        (found,) = reference.log_probs(StepPasses([[pack]], joined=join, device=torch.device("cpu"))).values()
        values: list[float] = found.tolist()
        return values

    assert log_probs(0, "data") == [-1, -2]
    with pytest.raises(ConfigError, match="sample 1 of data has no log-probabilities of the reference, for no pack"):
        log_probs(1, "data")
    with pytest.raises(ConfigError, match="are stored of data, not of others: give it to the trainer as an eval"):
        log_probs(0, "others")


@pytest.mark.parametrize("overlong", ["truncate", "split"])
def test_a_pair_is_never_cut(folder: Path, overlong: Overlong) -> None:
    """A processor that names no objective is known by its samples alone."""
    data = dataset_of(folder / "data", packing_length=16, overlong=overlong)
    with pytest.raises(ConfigError, match=f"overlong is {overlong}, and samples for dpo are answers to compare"):
        trainer_of(folder, train_dataset=data, max_steps=6).train()
    unnamed = dataset_of(folder / "data", objective="", packing_length=16, overlong=overlong)
    with pytest.raises(DataError, match=r"its sequences have \d+ tokens, more than a pack holds, and they must"):
        list(islice(PackedLoader(unnamed, global_batch=1), len(ROWS)))


def test_a_collator_of_texts_cannot_take_pairs(folder: Path) -> None:
    sample = {"input_ids": np.arange(3), "labels": np.arange(3), "sequences": np.array([[3, 1]])}
    with pytest.raises(ConfigError, match="data_collator DataCollatorWithFlattening cannot take pairs"):
        CollatorAdapter(DataCollatorWithFlattening())([sample], [0])


def test_other_weights_are_other_log_probabilities(tmp_path: Path) -> None:
    """Files of two models lie beside each other."""
    write_answers(tmp_path / "data", ROWS)
    for model in (TRAINED, ModelConfig(config=MODEL, seed=4)):
        trainer_of(tmp_path, DPO(reference="stored"), model=model).build()
    assert len(list((tmp_path / "data" / "_lmms" / "reference").glob("*.json"))) == 2


def test_a_run_does_not_resume_with_another_reference(folder: Path, tmp_path: Path) -> None:
    trainer_of(folder, DPO(), output_dir=str(tmp_path), save_steps=1).train()
    resumed = trainer_of(folder, DPO(), output_dir=str(tmp_path), max_steps=2, model=ModelConfig(config=MODEL, seed=4))
    with pytest.raises(
        CheckpointError, match=r"compares with starting weights of digest .*: name the model that the run"
    ):
        resumed.train()
    trainer_of(folder, DPO(), output_dir=str(tmp_path), max_steps=2).train()
    assert [record["step"] for record in read_log(tmp_path)] == [1, 2]


def test_tasks_are_chosen_by_name_and_refuse_what_they_do_not_know() -> None:
    task = build_task("dpo", {"beta": 0.3, "loss_type": "ipo"})
    assert isinstance(task, DPO)
    assert task.beta == 0.3
    for options, message in (
        ({"beta": 0}, "beta must be a number above 0, got 0"),
        ({"loss_type": "sigmoyd"}, "task dpo has no loss_type 'sigmoyd': did you mean 'sigmoid'"),
        ({"label_smoothing": 0.5}, "label_smoothing must be from 0 to below 0.5, got 0.5"),
        ({"label_smoothing": 0.1, "loss_type": "ipo"}, "label_smoothing 0.1 is for loss_type sigmoid and robust"),
        ({"reference": "none"}, "reference must be model or stored, got 'none'"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_task("dpo", options)
    with pytest.raises(ConfigError, match="desirable_weight must be 0 or more, got -1"):
        build_task("kto", {"desirable_weight": -1})
    message = "on the packs of each step and cannot be measured before the run: set reference to model"
    with pytest.raises(ConfigError, match=message):
        build_task("kto", {"reference": "stored"})


def test_a_task_that_does_not_add_z_loss_refuses_it(folder: Path) -> None:
    for given in (DPO(), None, CausalLanguageModelling(z_loss=0.2)):
        processors = [] if isinstance(given, CausalLanguageModelling) else [SimpleNamespace(objective="dpo")]
        with pytest.raises(
            ConfigError, match=r"train.z_loss 0.1 is a loss of task causal, and \w+ does not add it: set"
        ):
            Functions().task(given, z_loss=0.1, processors=processors)
    assert isinstance(Functions().task(DPO(), z_loss=0, processors=[SimpleNamespace(objective="dpo")]), DPO)
    own = CausalLanguageModelling(z_loss=0.1)
    assert Functions().task(own, z_loss=0.1) is own


def test_tasks_and_datasets_that_do_not_fit_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="task causal cannot train on a dataset for dpo: leave task out"):
        trainer_of(folder, CausalLanguageModelling())
    with pytest.raises(ConfigError, match="task kto cannot train on a dataset for dpo"):
        trainer_of(folder, KTO())
    write_tokens(tmp_path / "data", num_samples=60)
    run = write_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=1)
    with pytest.raises(ConfigError, match="task dpo cannot train on a dataset for causal"):
        trainer_of_run(run, task=DPO())


def test_samples_of_other_roles_are_refused_by_number(folder: Path) -> None:
    answers = trainer_of(folder, train_dataset=dataset_of(folder / "kto"))
    with pytest.raises(ConfigError, match=r"task dpo learns from a chosen answer and then a rejected one, and sample"):
        answers.train()
    plain = {"input_ids": np.arange(3), "labels": np.arange(3)}
    with pytest.raises(ConfigError, match="task kto learns from one answer, with its label, and sample 5 has no seq"):
        KTO().collate([plain], [5])
