"""Supervised fine-tuning with FSDP2 over packed batches: what is given, built of it, and may be changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers.trainer_utils import PredictionOutput, TrainOutput

from ..errors import ConfigError
from ..mds.core import processor_of
from ..mds.dataset_config import DatasetConfig
from ..signals import StopSignal
from ..types import Batch
from .data import RunData, named_evaluations
from .evaluate import evaluate, joined_figures, predict
from .functions import Functions, compared_by, resolved_of
from .habits.arguments import arguments_of
from .habits.given import Given
from .loop import Loop
from .members import TransformersMembers, check_overrides
from .model.build import ModelConfig
from .model.isolation import positions_of
from .model.model import PackedModel
from .parts import Parts
from .report.run_log import RunLog
from .run.callbacks import Callbacks
from .run.counts import RunCounts
from .run.flow import Best, Control
from .run.mesh import join_world
from .run.optimizers import adopt_optimizer, build_optimizer, groups_of
from .run.phases import Phases
from .run.precision import with_precision
from .run.schedules import Schedule, build_scheduler
from .run.settings import Datasets, TrainConfig
from .standing import Finish, finish, model_to_fill, model_to_share, resume, resume_choice, trainer_state
from .tasks.causal import losses_of_function
from .tasks.task import LossSum, Task

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainerState, TrainingArguments


class FSDP2SFTTrainer(TransformersMembers):
    """Trains a transformers model on packed samples, sharded with FSDP2.

    The loss of a step is that of the task (default: causal language modelling, the sum of its token losses over its
    loss tokens), both sums over the global batch, so it does not depend on how packs fall to ranks. Resumes from the
    latest checkpoint below args.output_dir when there is one, where args is a TrainConfig.

    The constructor checks what it is given, opens datasets and joins the process group (one that is there is taken,
    and left alone). Model, optimizer and the rest are built when they are first asked for, or by train, evaluate and
    save_model; all ranks ask alike. Override create_model, create_optimizer, create_scheduler, compute_loss,
    training_step, evaluation_step and log to change them. Arguments have the meaning that they have in transformers'
    Trainer and TRL's SFTTrainer. config: how the run trains, in our words, whatever args are.

    Raises ConfigError, CheckpointError, CursorError, TrainingError, and StoppedError after a signal.
    """

    def __init__(
        self,
        model: str | Path | ModelConfig | torch.nn.Module | None = None,
        args: TrainConfig | TrainingArguments | None = None,
        train_dataset: Datasets | DatasetConfig | Any = None,
        eval_dataset: Datasets | DatasetConfig | Any = None,
        data_collator: Callable[..., Any] | None = None,
        task: Task | None = None,
        processing_class: Any = None,
        model_init: Callable[..., torch.nn.Module] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[[Any], Mapping[str, float]] | None = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, LRScheduler | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], Mapping[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        peft_config: Any = None,
        formatting_func: Callable[..., Any] | None = None,
        quantization_config: Any = None,
    ):
        check_overrides(type(self))
        self.functions = Functions(
            model_init=model_init, compute_loss_func=compute_loss_func, compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics, optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )  # fmt: skip
        self.functions.check(model=model, task=task, eval_dataset=eval_dataset)
        given = Given(
            model=model, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset, data_collator=data_collator,
            processing_class=processing_class, formatting_func=formatting_func, peft_config=peft_config,
            quantization_config=quantization_config, objective=compared_by(task),
        )  # fmt: skip
        resolved = resolved_of(given)
        self.config: TrainConfig = with_precision(resolved.config)
        self.args: Any = args if args is not None else resolved.arguments
        self.processing_class = resolved.processing_class
        self._given = resolved.model
        self._finish: Finish = partial(finish, token_ids=resolved.token_ids, has_dropout=resolved.has_dropout)
        self._named = resolved.model if type(self).create_model is FSDP2SFTTrainer.create_model else None
        trained_on = map(processor_of, named_evaluations(resolved.train_dataset).values())
        self.task = self.functions.task(task, z_loss=self.config.z_loss, processors=trained_on)
        self.world, self.device = join_world(self.config)
        self.output_dir = Path(self.config.output_dir)
        self.run_log = RunLog(self.config, world=self.world)
        self.data = RunData(
            self.config, resolved.train_dataset, resolved.eval_dataset, world=self.world, device=self.device,
            collator=resolved.data_collator or self.task.collate, open_rows=resolved.open_rows,
        )  # fmt: skip
        self.loader = self.data.loader
        self.counts, self.best, self.phases = RunCounts(), Best.of(self.config), Phases()
        self.parts = Parts(self, lambda: model_to_share(self, self._named, finish=self._finish))
        self.callbacks = Callbacks(
            callbacks or (), world_size=self.world.world_size, standing=lambda: trainer_state(self),
            arguments=lambda: resolved.arguments or arguments_of(self.config),
        )  # fmt: skip
        self.callbacks.given = {"processing_class": self.processing_class}
        if resolved.arguments is not None:
            _ = self.callbacks.state  # its log_history is kept, which users of transformers read at the end
        self.callbacks.call("on_init_end")

    # What may be overridden: the trainer itself calls each.

    def create_model(self) -> torch.nn.Module:
        """The transformers model to train, whole: rank 0's weights count, other ranks' may be on the meta device."""
        given, init = self._given, self.functions.model_init
        if init is not None:
            given = init() if not inspect.signature(init).parameters else init(None)  # no trial of a search
        made: Any = given.build() if isinstance(given, ModelConfig) else given
        return self._finish(made)

    def create_optimizer(self) -> torch.optim.Optimizer:
        """An optimizer over parameters of self.model, which is sharded."""
        config, (given, _), chosen = self.config, self.functions.optimizers, self.functions.optimizer_cls_and_kwargs
        if given is not None:
            return adopt_optimizer(given, self.parts.names, self.model)
        if chosen is None:
            return build_optimizer(self.model.model, config)
        kind, options = chosen
        return kind(groups_of(self.model.model, config), **options)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        """torch's scheduler of a run of as many steps (tokens, with max_tokens), to be stepped after each step.

        It is made anew where a run resumes, and stepped to there: its state is not saved.
        """
        given = self.functions.optimizers[1]
        return given or build_scheduler(self.config, optimizer or self.optimizer, num_training_steps)

    def compute_loss(
        self, model: PackedModel, batch: Batch, packs: Sequence[Batch], units: Mapping[str, float]
    ) -> Mapping[str, LossSum]:
        """The losses of each objective of the task, summed over packs: their total, to be differentiated, and by pack.

        batch: the packs joined to one sequence, on the device. units: of each objective in the global batch, by which
        totals are divided afterwards (in an evaluation, of this pack).
        """
        function = self.functions.compute_loss_func
        if function is not None:
            return losses_of_function(function, model, batch, packs, units)
        return self.steps.task_losses(model, batch, packs)

    def training_step(self, packs: Sequence[Batch], units: Sequence[float]) -> torch.Tensor:
        """Add up the gradients of this rank's packs of a step. units: of each objective in the global batch.

        Returns, of each objective that is logged, the losses by source, then their units: float64[logged, 2, sources].
        """
        return self.steps.backward(packs, units)

    def evaluation_step(self, pack: Batch) -> Sequence[torch.Tensor]:
        """The losses of a pack, summed, of each objective that is logged: float64[] each."""
        return self.steps.forward(pack)

    def log(self, logs: Mapping[str, Any], start_time: float | None = None) -> None:
        """Write a record, and give it to the callbacks. All ranks log those of the run, which have a "step".

        A script may log figures of its own on any rank; outside of train the callbacks alone get them.
        """
        record = {"step": self.step, **logs}
        self.run_log.write(record, position=self.position)
        self.callbacks.log({**record, "epoch": self.data.epoch}, agrees="step" in logs)

    # What is done.

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> TrainOutput:
        """Run to the end, resuming first when there is a checkpoint, as args.resume says.

        resume_from_checkpoint: True, from the latest, which must be there; the path or URL of one; False refuses to
        start where there are any.
        """
        doing = self.phases.doing
        with StopSignal() as stop, self.data.worker_errors(), self.run_log.watched(self.phases):
            with doing("build"):
                self.build(resume_from_checkpoint)
            with self.saver:
                with doing("resume"):
                    resume(self, resume_from_checkpoint)
                    self.parts.begin_filled()
                self.model.train()
                self.data.tell_positions(positions_of(getattr(self.model.model, "config", None)))
                with self.run_log.running(self.schedule, step=self.step, position=self.position):
                    self.saver.probe()
                    self.meter.start()
                    choice = resume_choice(resume_from_checkpoint) or self.config.resume
                    loop = Loop(self, stop, is_automatic=choice == "auto")
                    loop.run()
                    output = loop.end()
                with doing("last_save"):
                    self.saver.wait()
            self.saver.export()
        return output

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Sequence[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The loss over all of the eval_dataset: the mean over its loss tokens; all ranks call it.

        Of several by name, each one's as eval_NAME_loss, and that over all of them. Figures of compute_metrics beside.
        eval_dataset: instead of the trainer's: a dataset, several by name, or the name of one of the trainer's.
        """
        named = self.data.to_evaluate(eval_dataset)
        if not named:
            raise ConfigError("there is no eval_dataset: give one to the trainer, or to evaluate")
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
        """Predictions and labels of all samples, by sample id, on every rank, and metrics; all ranks call it.

        predictions: the logits, or what preprocess_logits_for_metrics makes of them, padded with -100 to the longest
        sample; label_ids: int64[samples, tokens]. metrics: as evaluate's.
        """
        made = predict(self, self.data.one_to_evaluate(test_dataset)[1], prefix=metric_key_prefix)
        self.callbacks.call("on_predict", metrics=made.metrics)
        return made

    def hyperparameter_search(self, *_: Any, **__: Any) -> NoReturn:
        """A run is one set of arguments: ConfigError."""
        raise ConfigError(
            "hyperparameter_search is not here: start a run for each set of arguments, in a process of its own, from "
            "Optuna or Ray Tune, and return evaluate()'s figure to them"
        )

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Write the model as it is now as a transformers folder (default: the output_dir); all ranks call it.

        _internal_call: of transformers' Trainer, which then uploads nothing; nothing is uploaded here.
        """
        self.saver.write_model(Path(output_dir or self.output_dir))

    def build(self, resume_from_checkpoint: bool | str | Path | None = False) -> None:
        """Build all that training needs, which train does otherwise; all ranks call it.

        resume_from_checkpoint: what train is given next: weights that a checkpoint will fill are not built.
        """
        if "model" not in vars(self.parts):
            self.parts.empty = model_to_fill(self, self._named, resume_from_checkpoint, finish=self._finish)
        self.parts.build()

    # Where it stands.

    @property
    def step(self) -> int:
        """Finished steps."""
        return self.counts.step

    @property
    def position(self) -> int:
        """The position of the run in its schedule, in steps or tokens."""
        return self.schedule.position(step=self.counts.step, tokens_seen=self.counts.tokens_seen)

    @property
    def is_finished(self) -> bool:
        return self.position >= self.schedule.length

    @property
    def max_steps(self) -> int:
        """Steps of the whole run; 0 where they are not known: before anything is built, and with max_tokens."""
        schedule: Schedule | None = vars(self.parts).get("schedule")
        return 0 if schedule is None or schedule.counts_tokens else schedule.length

    def set_length(self) -> None:
        """Have the schedule end where the run ends, after what is left of the data may have changed."""
        self.parts.set_length()

    # Callbacks, as transformers' Trainer has them.

    @property
    def state(self) -> TrainerState:
        return self.callbacks.state

    @property
    def control(self) -> Control:
        return self.callbacks.control

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        self.callbacks.add(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        return self.callbacks.pop(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        self.callbacks.pop(callback)

    def is_world_process_zero(self) -> bool:
        return self.world.rank == 0

    def is_local_process_zero(self) -> bool:
        return self.world.is_first_of_node
