"""What users change of a trainer: methods that they override, and functions and objects that they give it."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.config import load_config
from lmms_stream.doors.huggingface.trainer import FSDP2SFTTrainer
from lmms_stream.errors import CheckpointError, ConfigError, TrainingError
from lmms_stream.loader.collate import collate
from lmms_stream.tools.ledger.run import Ledger
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.model.model import PackedModel
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.run.distributed import init_distributed
from lmms_stream.train.run_config import RunConfig
from lmms_stream.train.tasks.task import LossSum
from lmms_stream.types import Batch
from torch.optim.lr_scheduler import LRScheduler, StepLR
from transformers import AutoModelForCausalLM, TrainerCallback

from ..conftest import last_words, run_command, write_tokens
from ..processes import ROOT
from ..rounds import in_long_rounds
from .runs import MODEL, VOCABULARY, trainer_of, write_run


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("overridden")
    write_tokens(folder / "data", num_samples=100)
    settings: dict[str, Any] = {"max_steps": 3, "log_sample_ids": False, "global_batch": 4, "async_save": False}
    return write_run(folder / "run.yaml", folder / "data", eval_dataset={"shuffle": False}, **settings)


def parts_of(config: Path, *overrides: str) -> dict[str, Any]:
    """The arguments of a trainer, as trainer_of gives them; the model is not built."""
    run = load_config(RunConfig, config, overrides)
    world, _ = init_distributed(run.train.timeout_s)
    evaluated = run.eval_dataset.build(world) if run.eval_dataset else None
    return {
        "model": run.model,
        "args": run.train,
        "train_dataset": run.build_datasets(world),
        "eval_dataset": evaluated,
    }


class Changed(FSDP2SFTTrainer):
    """Overrides every point, so that each shows in what is logged or in the weights."""

    def create_model(self) -> torch.nn.Module:
        self.weights: list[torch.Tensor] = []
        model: Any = super().create_model()
        with torch.no_grad():
            model.lm_head.weight.mul_(1e-3)  # all tokens are nearly as likely
        return model  # type: ignore[no-any-return]

    def create_optimizer(self) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        return None  # type: ignore[return-value]  # as some of transformers' users write it

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        assert num_training_steps == 3
        assert optimizer is not None
        self.lr_scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
        return self.lr_scheduler

    def compute_loss(
        self, model: PackedModel, batch: Batch, packs: Sequence[Batch], units: Mapping[str, float]
    ) -> Mapping[str, LossSum]:
        sums = super().compute_loss(model, batch, packs, units)
        return {name: LossSum(2 * each.total, 2 * each.of_packs) for name, each in sums.items()}

    def training_step(self, packs: Sequence[Batch], units: Sequence[float]) -> torch.Tensor:
        self.weights.append(self.flat_weights())
        losses = super().training_step(packs, units)
        if self.step == 1:
            self.optimizer.zero_grad(set_to_none=False)
        return losses

    def evaluation_step(self, pack: Batch) -> Sequence[torch.Tensor]:
        return [5 * loss for loss in super().evaluation_step(pack)]

    def log(self, logs: Mapping[str, Any], start_time: float | None = None) -> None:
        super().log({**logs, "mine": 1.0})

    def flat_weights(self) -> torch.Tensor:
        return torch.cat([each.detach().full_tensor().flatten() for each in self.model.parameters()])  # type: ignore[attr-defined]


def test_each_override_point_is_what_the_trainer_itself_uses(config: Path, tmp_path: Path) -> None:
    overrides = [f"train.output_dir={tmp_path}", "train.eval_on_start=true", "train.eval_steps=no"]
    trainer = Changed(**parts_of(config, *overrides))
    assert "model" not in vars(trainer)  # the constructor builds nothing
    output = trainer.train()
    first, *records = read_log(tmp_path)
    chance = math.log(VOCABULARY)
    assert first["eval_loss"] == pytest.approx(2 * 5 * chance, rel=1e-4)
    assert records[0]["loss"] == pytest.approx(2 * chance, rel=1e-4)
    assert [record["learning_rate"] for record in records] == [0.5, 0.25, 0.125]
    assert [record["mine"] for record in records] == [1.0] * 3
    assert records[1]["grad_norm"] == 0
    moved = [
        float((after - before).norm()) for before, after in zip(trainer.weights, trainer.weights[1:], strict=False)
    ]
    assert moved == [pytest.approx(0.5 * min(1.0, records[0]["grad_norm"]), rel=1e-4), 0]
    assert output.global_step == 3
    assert output.training_loss == pytest.approx(np.mean([record["loss"] for record in records]))
    assert output.metrics["train_loss"] == output.training_loss


def test_an_optimizer_and_a_scheduler_that_are_given_are_sharded_with_the_model_and_resumed(
    config: Path, tmp_path: Path
) -> None:
    """The scheduler's rate follows from the one before: it is stepped to where the run goes on."""

    def run(name: str, *overrides: str) -> FSDP2SFTTrainer:
        given = parts_of(config, f"train.output_dir={tmp_path / name}", "train.eval_steps=no", *overrides)
        model = given.pop("model").build()
        optimizer = torch.optim.Adam(
            [{"params": [*model.parameters()][:3]}, {"params": [*model.parameters()][3:]}], 1e-3
        )
        trainer = FSDP2SFTTrainer(model, optimizers=(optimizer, StepLR(optimizer, 1, gamma=0.5)), **given)
        trainer.train()
        assert trainer.optimizer is optimizer
        assert len(optimizer.param_groups[0]["params"]) == 3
        return trainer

    run("whole", "train.max_steps=4")
    run("resumed", "train.max_steps=2")
    run("resumed", "train.max_steps=4")
    whole, resumed = read_log(tmp_path / "whole"), read_log(tmp_path / "resumed")
    assert [record["learning_rate"] for record in whole] == [1e-3, 5e-4, 2.5e-4, 1.25e-4]
    for name in ("loss", "grad_norm", "learning_rate"):
        assert [record[name] for record in resumed] == [record[name] for record in whole]


def loss_of(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
    """The default loss, as transformers' users write it."""
    logits = outputs["logits"][0, :-1].float()
    return torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum") / num_items_in_batch


class Predicted(TrainerCallback):
    metrics: Mapping[str, float] = {}

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        type(self).metrics = metrics


def model_init() -> torch.nn.Module:
    made: torch.nn.Module = ModelConfig(config=MODEL).build()
    return made


def shifted_losses(predictions: Any, *, is_logits: bool) -> dict[str, float]:
    """What compute_metrics makes: the loss, or the share of tokens that are right, of all samples."""
    assert predictions.label_ids.shape[0] == 100
    found, labels = predictions.predictions[:, :-1], predictions.label_ids[:, 1:]
    learnt = labels != -100
    if not is_logits:
        return {"eval_right": (found == labels)[learnt].mean()}
    logits = torch.from_numpy(found[learnt])
    return {"own_loss": torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels[learnt])).item()}


def test_functions_of_transformers_users_make_the_model_the_optimizer_the_loss_and_the_metrics(
    config: Path, tmp_path: Path
) -> None:
    packs = "train.per_device_batch=2"
    plain = trainer_of(config, f"train.output_dir={tmp_path / 'plain'}", packs, "train.optim_args.betas=[0.9,0.95]")
    plain.train()
    given = parts_of(config, f"train.output_dir={tmp_path / 'functions'}", packs) | {"model": None}
    trainer = FSDP2SFTTrainer(
        model_init=model_init,
        compute_loss_func=loss_of,
        optimizer_cls_and_kwargs=(torch.optim.AdamW, {"lr": 1e-3, "betas": (0.9, 0.95), "fused": True}),
        compute_metrics=lambda predictions: shifted_losses(predictions, is_logits=True),
        **given,
    )
    trainer.train()
    expected, found = read_log(tmp_path / "plain"), read_log(tmp_path / "functions")
    assert len(expected) == 4
    for record, other in zip(expected, found, strict=True):
        for name in {"loss", "eval_loss", "grad_norm"} & record.keys():
            assert other[name] == pytest.approx(record[name], rel=1e-5)
    assert found[-1]["eval_own_loss"] == pytest.approx(expected[-1]["eval_loss"], rel=1e-5)
    right = trainer_of(
        config,
        f"train.output_dir={tmp_path / 'right'}",
        compute_metrics=lambda predictions: shifted_losses(predictions, is_logits=False),
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    ).evaluate(metric_key_prefix="test")
    assert {"test_loss", "test_num_loss_tokens", "test_eval_right"} == set(right)
    assert 0 <= right["test_eval_right"] <= 1


def test_metrics_of_logits_take_no_second_forward_and_no_more_than_a_samples_logits(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[torch.Size] = []

    def kept(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert logits.shape == (1, labels.shape[1], VOCABULARY)
        shapes.append(labels.shape)
        return logits.argmax(-1)

    trainer = trainer_of(
        config,
        f"train.output_dir={tmp_path}",
        compute_metrics=lambda predictions: shifted_losses(predictions, is_logits=False),
        preprocess_logits_for_metrics=kept,
    )
    num_forwards = 0

    def count(*_: Any) -> None:
        nonlocal num_forwards
        num_forwards += 1

    trainer.model.model.model.layers[0].register_forward_hook(count)
    for way in trainer.model.logits_ways:
        trainer.model.logits_way, num_forwards = way, 0
        figures = trainer.evaluate()
        num_packs = sum(1 for _ in trainer.data.eval_loader("", trainer.data.evaluations[""]))
        assert num_forwards == num_packs * (2 if way == "kept" else 1), way  # which makes those of learnt tokens alone
        assert figures["eval_right"] == pytest.approx(trainer.evaluate()["eval_right"])
    assert max(length for _, length in shapes) < 60  # a sample's, of packs of 256


def test_predictions_are_the_models_own_logits_by_sample(config: Path, tmp_path: Path) -> None:
    trainer = trainer_of(config, f"train.output_dir={tmp_path}", callbacks=[Predicted])
    dataset = trainer.data.evaluations[""]
    made: Any = trainer.predict(dataset)
    plain = trainer_of(config, f"train.output_dir={tmp_path}").evaluate(metric_key_prefix="test")
    assert made.metrics == plain
    assert Predicted.metrics == made.metrics
    assert made.label_ids.shape == (100, 59)
    for sample_id in (0, 1, 99):
        labels = made.label_ids[sample_id]
        length = int((made.predictions[sample_id, :, 0] != -100).sum())
        assert set(labels[labels != -100]) == {sample_id}
        ids = torch.full((1, length), sample_id)
        with torch.no_grad():
            expected = trainer.model.plain_logits(
                collate([{"input_ids": ids[0].numpy(), "labels": ids[0].numpy()}], [0])
            )
        np.testing.assert_allclose(made.predictions[sample_id, :length], expected[0].numpy(), rtol=1e-5, atol=1e-6)
        assert (made.predictions[sample_id, length:] == -100).all()
    with pytest.raises(ConfigError, match="test_dataset is a list: give a PackedStreamingDataset"):
        trainer.predict([])


def test_a_search_for_hyperparameters_is_refused_with_what_to_do(config: Path) -> None:
    with pytest.raises(ConfigError, match="hyperparameter_search is not here: start a run for each set of arguments"):
        trainer_of(config).hyperparameter_search(lambda trial: {}, n_trials=3)


def test_a_metric_that_fails_ends_the_run_with_its_cause(config: Path) -> None:
    trainer = trainer_of(config, compute_metrics=lambda predictions: {"ratio": 1 / 0})
    with pytest.raises(
        TrainingError, match=r"compute_metrics failed on rank 0 \(ZeroDivisionError: division by zero\)"
    ):
        trainer.evaluate()


def test_several_datasets_are_evaluated_by_name_and_together(config: Path, tmp_path: Path) -> None:
    given = parts_of(config, f"train.output_dir={tmp_path}")
    one = given.pop("eval_dataset")
    trainer = FSDP2SFTTrainer(eval_dataset={"a": one, "b": one}, **given)
    figures = trainer.evaluate()
    assert figures["eval_a_loss"] == figures["eval_b_loss"]
    assert figures["eval_loss"] == pytest.approx(figures["eval_a_loss"])
    assert figures["eval_num_loss_tokens"] == 2 * figures["eval_a_num_loss_tokens"]
    assert trainer.evaluate(one)["eval_loss"] == figures["eval_a_loss"]


def test_a_model_is_saved_as_it_is_as_a_folder_of_transformers(config: Path, tmp_path: Path) -> None:
    trainer = trainer_of(config, f"train.output_dir={tmp_path}", "model.config.tie_word_embeddings=true")
    trainer.train()
    trainer.save_model()
    trainer.save_model(tmp_path / "elsewhere")
    expected = {name: each.full_tensor() for name, each in trainer.model.model.named_parameters()}
    for folder in (tmp_path, tmp_path / "elsewhere"):
        loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        found = dict(loaded.named_parameters())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    (tmp_path / "file").touch()
    with pytest.raises(Exception, match=f"{tmp_path}/file"):
        trainer.save_model(tmp_path / "file")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": None}, "a trainer needs exactly one of model and model_init: give one of them"),
        ({"model_init": model_init}, "a trainer needs exactly one of model and model_init: give one of them"),
        ({"train_dataset": None}, "train_dataset is missing: give a dataset, or several by name"),
        ({"callbacks": [int]}, "callback 0 is none of transformers': inherit from transformers.TrainerCallback"),
        ({"compute_loss_func": loss_of, "task": object()}, "compute_loss_func and task both define the loss"),
        (
            {"preprocess_logits_for_metrics": max},
            "preprocess_logits_for_metrics needs compute_metrics: pass compute_metrics, too",
        ),
        ({"compute_metrics": max, "eval_dataset": None}, "compute_metrics needs an eval_dataset: pass one"),
        (
            {"optimizers": (torch.optim.SGD([torch.zeros(1)]), None)},
            "optimizers has parameters of an existing model",
        ),
    ],
)
def test_what_is_given_and_cannot_be_kept_is_named_by_the_constructor(
    config: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        FSDP2SFTTrainer(**parts_of(config) | given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"optimizer_cls_and_kwargs": (torch.optim.SGD, {})},
            "optimizers and optimizer_cls_and_kwargs both set the optimizer: leave one of them out",
        ),
        (
            {"optimizers": (None, StepLR(torch.optim.SGD([torch.zeros(1)]), 1))},
            "optimizers has a scheduler without its optimizer: give both, or override create_scheduler",
        ),
        ({}, "optimizers has parameters that do not belong to the model: pass the model of this optimizer"),
    ],
)
def test_optimizers_that_do_not_fit_are_named(config: Path, given: dict[str, Any], message: str) -> None:
    made: dict[str, Any] = {**parts_of(config), "optimizers": (torch.optim.SGD([torch.zeros(1)]), None)}
    made["model"] = made["model"].build()
    with pytest.raises(ConfigError, match=re.escape(message)):
        FSDP2SFTTrainer(**made | given).build()


def test_where_a_run_resumes_can_be_said_as_in_transformers(config: Path, tmp_path: Path) -> None:
    out = f"train.output_dir={tmp_path}"
    quiet = ["train.eval_steps=no", "train.save_steps=1"]
    with pytest.raises(CheckpointError, match="has no checkpoint to resume from: call train"):
        trainer_of(config, out, *quiet).train(resume_from_checkpoint=True)
    trainer_of(config, out, *quiet, "train.max_steps=2").train()
    with pytest.raises(CheckpointError, match=r"has checkpoints, the latest of step 2, and train.resume is never"):
        trainer_of(config, out, *quiet).train(resume_from_checkpoint=False)
    trainer_of(config, out, *quiet).train(resume_from_checkpoint=tmp_path / "checkpoints" / "step-00000001")
    trainer_of(config, out, *quiet, "train.max_steps=4").train(resume_from_checkpoint=True)
    assert [record["step"] for record in read_log(tmp_path)] == [1, 2, 2, 3, 4]


def test_strategies_say_when_records_evaluations_and_checkpoints_come(config: Path, tmp_path: Path) -> None:
    epochs = [f"train.{name}_steps=epoch" for name in ("save", "eval", "logging")]
    trainer = trainer_of(
        config, f"train.output_dir={tmp_path / 'epochs'}", *epochs, "train.max_steps=null", "train.num_train_epochs=2",
        "train.logging_first_step=true",
    )  # fmt: skip
    trainer.train()
    half, end = trainer.step // 2, trainer.step
    records = read_log(tmp_path / "epochs")
    assert [(each["step"], "eval_loss" in each) for each in records] == [
        (1, False), (half, False), (half, True), (end, False), (end, True),
    ]  # fmt: skip
    saved = sorted(path.name for path in (tmp_path / "epochs" / "checkpoints").glob("step-*"))
    assert saved == [f"step-{half:08d}", f"step-{end:08d}"]
    none = [f"train.{name}_steps=no" for name in ("save", "eval", "logging")]
    trainer = trainer_of(config, f"train.output_dir={tmp_path / 'none'}", *none)
    assert trainer.train().global_step == 3
    assert read_log(tmp_path / "none") == []
    assert not [*(tmp_path / "none" / "checkpoints").glob("*step-*")]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train.best.load=true", "train.eval_steps=no"],
            "train.best.load needs checkpoi",
        ),
        (
            ["train.save_steps=best", "eval_dataset=null"],
            "train.save_steps best needs evaluations: give an eval_",
        ),
        (["train.export=true", "train.save_steps=no"], "train.export needs a checkpoint, and train.save_steps"),
        (
            ["train.save_steps=epoch", "dataset.packing_mode=lanes"],
            "train.save_steps is epoch, and packs of lanes",
        ),
    ],
)
def test_strategies_that_cannot_be_are_named(config: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        trainer_of(config, *overrides)


@in_long_rounds
def test_the_best_model_is_loaded_where_its_step_was_saved_before_it_was_evaluated(
    config: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(
        config, f"train.output_dir={tmp_path}", "train.save_steps=1", "train.save_total_limit=1",
        "train.eval_steps=epoch", "train.best.load=true", "train.best.mode=max",
        "train.max_steps=null", "train.num_train_epochs=3", "train.lr_scheduler_type=constant",
    )  # fmt: skip
    trainer.train()
    losses = {each["step"]: each["eval_loss"] for each in read_log(tmp_path) if "eval_loss" in each}
    best = max(losses, key=lambda step: losses[step])  # the first: the loss goes down
    assert best < max(losses) == trainer.step
    assert trainer.evaluate()["eval_loss"] == losses[best]
    saved = [f"step-{step:08d}" for step in (best, trainer.step)]
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == saved


@in_long_rounds
def test_a_run_in_our_own_words_imports_nothing_of_transformers_arguments_and_callbacks(
    config: Path, tmp_path: Path
) -> None:
    """In short rounds test_minimal.py runs such words, without the packages that are no hard dependencies."""
    script = (
        "import sys; import transformers.trainer_utils; its_own = {*sys.modules} & {'peft'}; "  # since 5.2 imports peft
        "from lmms_stream.train.__main__ import main; assert main(sys.argv[1:]) == 0; "
        "names = {'transformers.training_args', 'transformers.trainer_callback', 'transformers.trainer', 'datasets', "
        "'peft', 'trl'} - its_own; assert not names & sys.modules.keys(), names & sys.modules.keys()"
    )
    overrides = [f"train.output_dir={tmp_path}", "train.max_steps=1"]
    done = run_command(sys.executable, "-c", script, str(config), *overrides, cwd=ROOT)
    assert done.returncode == 0, last_words(done.stderr)


def test_an_epoch_that_a_callback_leaves_is_over_and_the_schedule_ends_with_the_run(
    config: Path, tmp_path: Path
) -> None:
    class Leave(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_epoch_stop = state.global_step == 2

    epochs = ["train.max_steps=null", "train.num_train_epochs=2", "train.lr_scheduler_type=linear"]
    trainer = trainer_of(config, f"train.output_dir={tmp_path}", *epochs, "eval_dataset=null", callbacks=[Leave])
    of_epoch = trainer.loader.steps_left
    assert trainer.train().global_step == 2 + of_epoch == trainer.schedule.length
    assert of_epoch > 2
    assert [record["epoch"] for record in read_log(tmp_path)][2] > 1
    assert trainer.schedule.learning_rate == 0
    assert trainer.state.max_steps == trainer.state.global_step == 2 + of_epoch
    ledger = Ledger(tmp_path)  # says that nobody read the rest of the epoch
    assert [number for number in range(ledger.stop) if ledger.step(number).is_skipped] == [*range(2, of_epoch)]
    (amounts,) = ledger.amounts().values()
    assert amounts.num_samples == trainer.counts.samples_seen


def test_a_metric_for_the_best_model_that_no_evaluation_has_is_named(config: Path, tmp_path: Path) -> None:
    trainer = trainer_of(config, f"train.output_dir={tmp_path}", "train.best.metric=f1", "train.eval_steps=1")
    with pytest.raises(ConfigError, match=r"train.best.metric eval_f1 is not a metric of the evaluation: choose"):
        trainer.train()
