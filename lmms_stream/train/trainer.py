"""Training with FSDP2 over packed batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_utils import PredictionOutput, TrainOutput

from ..errors import ConfigError
from ..lazy import lazy_names
from ..mds.core import processor_of
from ..signals import StopSignal
from .checkpoint.resume import Resumable
from .data import RunData, named_evaluations
from .evaluate import evaluate, joined_figures, predict
from .inputs import Functions, RunInputs
from .loop import Loop, step_digests
from .model.isolation import positions_of
from .parts import TrainerParts
from .report.run_log import RunLog
from .run.callbacks import Callbacks
from .run.counts import RunCounts
from .run.flow import Best
from .run.mesh import join_world
from .run.phases import Phases, StoppedError
from .run.precision import set_deterministic, with_precision
from .run.settings import TrainConfig
from .tasks.task import Task
from .trainer_state import (
    checkpoint_to_resume,
    finish,
    model_to_fill,
    model_to_share,
    resume,
    resume_choice,
    trainer_state,
)

if TYPE_CHECKING:
    from transformers import TrainerCallback


class PackedTrainer(TrainerParts):
    """Trains a transformers model on packed samples, sharded with FSDP2.

    The task computes the loss of a step (default: causal language modelling, the sum of token losses over the number of
    loss tokens). Both are sums over the global batch: the loss does not depend on the ranks of the packs. By default, a
    run resumes from the latest checkpoint in config.checkpoint_dir or below config.output_dir.

    The constructor checks the inputs and joins the process group (an existing group is used, and not ended). Model,
    optimizer and other parts are built on first use, or by train, evaluate and save_model; all ranks use parts in the
    same order. Override create_model, create_optimizer, create_scheduler, compute_loss, training_step, evaluation_step
    and log to change them.

    Raises ConfigError, CheckpointError, CursorError, TrainingError, and StoppedError after a signal.
    """

    def __init__(
        self,
        inputs: RunInputs,
        *,
        task: Task | None = None,
        functions: Functions | None = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] = (),
    ):
        self.inputs = inputs
        self._chosen: tuple[bool | str | Path | None, Resumable | None] | None = None  # the checkpoint of a resume
        self.functions = functions or Functions()
        self.config: TrainConfig = with_precision(inputs.config)
        set_deterministic(self.config)
        self.processing_class = inputs.processing_class
        super().__init__(partial(finish, token_ids=inputs.token_ids, has_dropout=inputs.has_dropout))
        self._named = inputs.model if type(self).create_model is PackedTrainer.create_model else None
        trained_on = map(processor_of, named_evaluations(inputs.train_dataset).values())
        self.task = self.functions.task(task, z_loss=self.config.z_loss, processors=trained_on)
        self.world, self.device = join_world(self.config)
        self.output_dir = Path(self.config.output_dir)
        self.run_log = RunLog(self.config, world=self.world)
        self.data = RunData(
            self.config, inputs.train_dataset, inputs.eval_dataset, world=self.world,
            collator=inputs.data_collator or self.task.collate, open_rows=inputs.open_rows,
        )  # fmt: skip
        self.loader = self.data.loader
        self.counts, self.best, self.phases = RunCounts(), Best.of(self.config), Phases()
        self.around_build: Callable[[], AbstractContextManager[None]] = nullcontext  # entered for the build of train
        self.callbacks = Callbacks(
            callbacks, world_size=self.world.world_size, standing=lambda: trainer_state(self),
            arguments=self.callback_arguments,
        )  # fmt: skip
        parts = dict.fromkeys(("model", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader"))
        self.callbacks.given = {"processing_class": self.processing_class, **parts}
        if inputs.arguments is not None:
            _ = self.callbacks.state  # keep log_history: users of transformers read it at the end
        self.callbacks.call("on_init_end")

    def begin_model(self) -> torch.nn.Module:
        return model_to_share(self, self._named, finish=self._finish)

    def callback_arguments(self) -> Any:
        """Return the arguments for callbacks."""
        return self.inputs.arguments or self.config

    # Actions of a trainer.

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> TrainOutput:
        """Train to the end of the run, after resuming from a checkpoint by config.resume.

        resume_from_checkpoint: replaces config.resume. True: resume from the latest checkpoint, an error without
        checkpoints; a path or URL: resume from this checkpoint; False: refuse to start if checkpoints exist.
        """
        choice = resume_choice(resume_from_checkpoint) or self.config.resume
        with self.owner, StopSignal() as stop, self.data.worker_errors():
            with self.run_log.watched(self.phases):
                with self.phases.until(stop), self.phases.doing("build"), self.around_build():
                    found = self._chosen_checkpoint(resume_from_checkpoint)
                    self._chosen = None  # a second call of train chooses again
                    self._build(found)
                with self.saver:
                    output = self._run(found, stop, choice=choice)
            if self.config.export and self.saver.latest and self.world.rank == 0:  # other ranks do not wait for it
                told = f"told to stop by a signal: {self.saver.latest} is saved, and the same command exports it"
                with stop.raising(StoppedError(told)):
                    self.saver.export(self.saver.latest)
        return output

    def _run(self, found: Resumable | None, stop: StopSignal, *, choice: str) -> TrainOutput:
        """Resume from a checkpoint, if any, and train to the end of the run."""
        doing = self.phases.doing
        with self.phases.until(stop), doing("resume"):
            resume(self, found, choice=choice)
            self.begin_filled()
            self.phases.vote()
        self.model.train()
        self.data.tell_positions(positions_of(getattr(self.model.model, "config", None)))
        running = self.run_log.running(
            self.schedule, step=self.step, position=self.position, rank=self.meter.rank, phases=self.phases
        )
        with running, step_digests(self) as digests:
            self.saver.probe()
            stop.has_begun = True
            self.meter.start()
            loop = Loop(self, stop, is_automatic=choice == "auto", digests=digests)
            loop.run()
            output = loop.end()
        with doing("last_save"):
            self.saver.wait()
        return output

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Sequence[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the mean loss over all loss tokens of the eval_dataset, and other figures; all ranks call this.

        With several datasets, each also has eval_NAME_loss. Figures of compute_metrics are added. eval_dataset: in
        place of the trainer's datasets: a dataset, several by name, or the name of a dataset of the trainer.
        """
        named = self.data.to_evaluate(eval_dataset)
        if not named:
            raise ConfigError("there is no eval_dataset: pass one to the trainer, or to evaluate")
        figures = joined_figures(
            {name: evaluate(self, name, each, prefix=metric_key_prefix) for name, each in named.items()},
            prefix=metric_key_prefix,
        )
        self.callbacks.log({"step": self.step, **figures, "epoch": self.data.epoch})
        self.callbacks.call("on_evaluate", metrics=figures)
        return figures

    def predict(
        self, test_dataset: Any, ignore_keys: Sequence[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Return predictions and labels of all samples, by sample id, on every rank, and metrics; all ranks call this.

        predictions: the logits, or the result of preprocess_logits_for_metrics, padded with -100 to the longest sample.
        label_ids: int64[samples, tokens]. metrics: see evaluate.
        """
        made = predict(self, self.data.one_to_evaluate(test_dataset)[1], prefix=metric_key_prefix)
        self.callbacks.call("on_predict", metrics=made.metrics)
        return made

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Write the current model to a transformers folder (default: the output_dir); all ranks call this.

        _internal_call: unused, an argument of transformers' Trainer against uploads; nothing is uploaded here.
        """
        self.saver.write_model(Path(output_dir or self.output_dir))

    def build(self, resume_from_checkpoint: bool | str | Path | None = False) -> None:
        """Build all parts for training ahead of train; all ranks call this.

        resume_from_checkpoint: the argument of the next call of train. Weights filled later by a checkpoint are not
        built.
        """
        self._build(None if resume_from_checkpoint is False else self._chosen_checkpoint(resume_from_checkpoint))

    def _chosen_checkpoint(self, resume_from_checkpoint: bool | str | Path | None) -> Resumable | None:
        """Choose the checkpoint to resume from, once for a call of build and the next call of train."""
        if self._chosen is None or self._chosen[0] != resume_from_checkpoint:
            self._chosen = resume_from_checkpoint, checkpoint_to_resume(self, resume_from_checkpoint)
        return self._chosen[1]

    def _build(self, found: Resumable | None) -> None:
        """Build all parts. found: the checkpoint to fill the model, then built without weights if possible."""
        if "model" not in vars(self):
            self.empty_model = model_to_fill(self, self._named, found, finish=self._finish)
        self.build_parts()


# FSDP2SFTTrainer was defined here, and programs import it from this module.
__getattr__, _ = lazy_names(__name__, {"FSDP2SFTTrainer": "..doors.huggingface.trainer"})
