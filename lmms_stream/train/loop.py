"""The training loop: steps, followed by logs, evaluations and checkpoints, to the end of the run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from transformers.trainer_utils import TrainOutput

from ..errors import ConfigError, TrainingError
from ..loader.loader import begin_stretch, stretch_of
from ..signals import StopSignal
from ..types import Batch
from .parts import TrainerParts
from .report.alerts import ALERTS, Alerts, ids_on_host, tell
from .report.train_log import StepDigests, digest_words
from .run.counts import StepReading, TrainedGroup, TrainedOn, Unreached, Votes, agree
from .run.distributed import gather_objects, seed_step
from .run.flow import Flow, SaveClock
from .run.optimizers import clip_gradients, step_if_finite
from .run.phases import StoppedError as StoppedError  # a public name of this module
from .trainer_state import state_of


class UnreadStep(NamedTuple):
    """A step whose values the host has not read. units: of each logged objective, over all ranks."""

    reading: StepReading
    units: list[float]
    groups: list[TrainedGroup]
    step: int
    is_trained_on: bool


class Loop:
    """Runs a trainer after building and resuming. All ranks do the same, whatever a callback decides.

    is_automatic: whether a new start resumes from the latest checkpoint. digests: file of the digests of steps; None:
    this process writes no digests.
    """

    def __init__(
        self,
        trainer: TrainerParts,
        stop: StopSignal,
        *,
        is_automatic: bool = True,
        digests: StepDigests | None = None,
    ):
        self.trainer, self._stop, self._is_automatic = trainer, stop, is_automatic
        self._flow = Flow(trainer.config, evaluates=bool(trainer.data.evaluations))
        self._begun_s, self._first = time.monotonic(), (trainer.counts.step, trainer.counts.samples_seen)
        self._logged = trainer.counts.step
        self._saved = trainer.counts.step or -1  # a resumed run has the checkpoint of this step
        self._is_saved_pending = trainer.counts.evaluation_pending  # in this checkpoint
        self._trained_on = TrainedOn(trainer.loader.sources)
        self._unreached = Unreached(trainer.model, trainer.config.groups)
        self._losses = 0.0  # sum of losses of logged steps
        self._unread: UnreadStep | None = None  # the latest step
        self._unwritten: Callable[[], dict[str, Any]] | None = None  # makes the record that ends with this step
        self._batches: list[Batch] = []  # batches of the latest step
        self._alerts = Alerts(trainer.config, trainer.loader, sample_ids=self._gathered_ids)
        self._learning_rate = 0.0
        self._in_epoch = False
        self._begun_epochs = 0  # epochs finished before the current epoch
        self._digests = digests
        self._clock = SaveClock(trainer.config.save_minutes, rank=trainer.world.rank)
        self._is_time_to_save = False

    def run(self) -> None:
        """Train to the end of the run, or until a callback ends the run."""
        trainer, num_empty = self.trainer, 0
        trainer.callbacks.begin_run()
        is_due = trainer.counts.evaluation_pending or (trainer.config.eval_on_start and not self._step)
        trainer.callbacks.control.should_evaluate |= is_due and bool(trainer.data.evaluations)
        self._do_what_is_due()
        while not self._is_over:
            self._skip()
            if trainer.loader.packs_left == 0:
                raise TrainingError(f"the data ended at step {self._step}: raise max_epochs, or end the run there")
            before = trainer.loader.step
            self._run_epoch()
            num_empty = num_empty + 1 if trainer.loader.step == before else 0
            if num_empty == 2:
                raise TrainingError(
                    f"the loader gave no batch twice at step {self._step}, and has {trainer.loader.packs_left} packs "
                    "left: this is a defect of the loader; please report it with the cursor of the latest checkpoint"
                )

    def end(self) -> TrainOutput:
        """Finish the run: last log, save and best model; return its output."""
        trainer = self.trainer
        self._trained_on.end()
        if trainer.config.logging_steps != "no":
            self.log()
        self.read()
        if trainer.config.save_steps not in ("no", "best") and self._saved != self._step:
            self._save()
        best = trainer.best.checkpoint
        if trainer.config.best.load and best is not None and trainer.best.step != self._step:
            trainer.saver.wait()
            found = trainer.saver.find(best)
            assert found is not None  # a missing named checkpoint is an error
            with trainer.phases.doing("resume"):
                trainer.saver.resume(found, lambda _: None)
        output = self._output()
        trainer.callbacks.log({"step": self._step, **output.metrics})
        trainer.callbacks.call("on_train_end")
        return output

    @property
    def _step(self) -> int:
        return self.trainer.counts.step

    @property
    def _is_over(self) -> bool:
        return self.trainer.is_finished or self.trainer.callbacks.control.should_training_stop

    def _run_epoch(self) -> None:
        """Do steps to the end of the epoch, or to packs to skip."""
        callbacks = self.trainer.callbacks
        begun = self._begun_epochs = self._num_epochs
        if not self._in_epoch:
            self._in_epoch = True
            callbacks.control.should_epoch_stop = False
            callbacks.call("on_epoch_begin")
        is_whole = True
        waiting = self.trainer.phases.of_each("data", self.trainer.meter.waiting(self.trainer.loader))
        for batches in self.trainer.data.steps_of(waiting):
            self._end_step(is_stopped=self.train_step(batches))
            self._leave_epoch()
            if callbacks.control.should_epoch_stop and not self._is_over:
                break
            if self._is_over or self._skip():
                is_whole = False
                break
        if is_whole or self._is_over or self._num_epochs > begun:
            self._end_epoch()

    def _end_epoch(self) -> None:
        trainer = self.trainer
        self._in_epoch = False
        self.read()
        self._flow.end_epoch(trainer.callbacks.control, epoch=trainer.data.epoch)
        trainer.callbacks.call("on_epoch_end")
        trainer.callbacks.agree()
        self._do_what_is_due()

    def _leave_epoch(self) -> None:
        """Skip the rest of the epoch, if any, after a callback has set should_epoch_stop."""
        loader = self.trainer.loader
        if not self.trainer.callbacks.control.should_epoch_stop or self._is_over:
            return
        if not self.trainer.data.has_epochs:
            raise ConfigError(
                "a callback set should_epoch_stop, and this run has no epochs: let it set should_training_stop"
            )
        if self._num_epochs == self._begun_epochs and (num_left := loader.steps_left):
            passed_over = [*self.trainer.config.skip_steps, (loader.step, loader.step + num_left)]
            begin_stretch(self.trainer.counts.history, stretch_of(loader, skipped=passed_over))
            loader.skip_steps(num_left)
            self.trainer.set_length()

    @property
    def _num_epochs(self) -> int:
        """Number of epochs finished by all sources."""
        return math.floor(min(self.trainer.loader.epochs.values(), default=0.0))

    def _skip(self) -> bool:
        """Skip the packs of next steps in skip_steps; return whether any packs were skipped."""
        loader, skipped = self.trainer.loader, False
        while any(first <= loader.step < stop for first, stop in self.trainer.config.skip_steps):
            loader.skip_steps(1)
            skipped = True
        return skipped

    def train_step(self, batches: list[Batch]) -> bool:
        """Do a step; return whether a signal told any rank to stop."""
        trainer = self.trainer
        callbacks, config, counts = trainer.callbacks, trainer.config, trainer.counts
        self._flow.begin_step(callbacks.control)
        callbacks.call("on_step_begin")
        with trainer.phases.doing("counts"):
            words, media = digest_words(batches), self._unreached.media(batches)
            agreed = agree(
                Votes(
                    stop=self._stop.is_received,
                    failed_save=trainer.saver.has_failed,
                    save_due=self._clock.is_due,
                    trace_due=trainer.run_log.takes_trace(),
                ),
                [*trainer.steps.units(batches), *media, *trainer.steps.of_sources(batches), *words],
                trainer.meter.count(batches),
                world=trainer.world,
            )
            everyone = trainer.meter.add(agreed.counts)
        num_objectives = len(trainer.steps.objectives)
        first = num_objectives + len(media)
        units, media, of_sources = (
            agreed.units[:num_objectives],
            agreed.units[num_objectives:first],
            agreed.units[first : -len(words)],
        )
        num_units = sum(trainer.steps.units_of_logged(units))
        is_trained_on = self._trained_on.take(
            num_units, [*zip(of_sources[::2], of_sources[1::2], strict=True)], step=counts.step + 1
        )
        if everyone.num_quarantined:
            trainer.data.left_out.take(batches, trainer.counts)
        self._is_time_to_save = agreed.votes.save_due > 0
        if agreed.votes.failed_save:
            trainer.saver.tell_failure()
        if agreed.votes.trace_due:
            trainer.run_log.trace_next_step()
        seed_step(config.seed, step=counts.step, group=trainer.world.rank // config.tensor_parallel)
        trainer.steps.begin_step(counts.step)
        losses = trainer.training_step(batches, units)
        self._learning_rate = trainer.schedule.learning_rate
        groups = self._unreached.reached(media)
        gradients = [each.gradient() for each in groups]
        with trainer.phases.doing("grad_norm"):
            grad_norm = clip_gradients(trainer.model.parameters(), config.max_grad_norm or math.inf)
        reading = StepReading(grad_norm, losses, gradients)
        self._update(grad_norm, reading, is_trained_on=is_trained_on)
        self.read()  # the step before, while the device does this one
        counts.step += 1
        self._unread = UnreadStep(reading, trainer.steps.units_of_logged(units), groups, counts.step, is_trained_on)
        trainer.phases.step = counts.step
        counts.tokens_seen += int(everyone.num_tokens)
        counts.samples_seen += int(everyone.num_samples)
        if self._digests is not None:
            self._digests.write(agreed.units[-len(words) :])
        trainer.schedule.move(trainer.position)
        trainer.run_log.end_step(trainer.position)
        self._alerts.end_step(batches, step=counts.step)
        self._batches = batches
        return agreed.votes.stop > 0

    def _update(self, norm: torch.Tensor, reading: StepReading, *, is_trained_on: bool) -> None:
        """Update the parameters, except if a gradient is not finite or the step trains on nothing.

        The device decides if the optimizer can leave the update out there. Otherwise, and for an average, the host
        waits for the norm and decides.
        """
        trainer = self.trainer
        trainer.callbacks.call("on_pre_optimizer_step")
        if is_trained_on:  # otherwise weight decay and momentum would change the parameters
            with trainer.phases.doing("optimizer"):
                is_decided = trainer.average is None and step_if_finite(trainer.optimizer, norm)
                if not is_decided and math.isfinite(reading.values[0]):
                    trainer.optimizer.step()
                    if trainer.average is not None:
                        trainer.average.update()
        trainer.callbacks.call("on_optimizer_step")
        trainer.optimizer.zero_grad()

    def read(self) -> None:
        """Count the gradient norm and the losses of the latest step, and write its record; wait for the step.

        A step is read once the next is queued, or before an evaluation, a save, or a callback that needs the record.
        """
        if self._unread is not None:
            unread, self._unread = self._unread, None
            self._count(unread)
        if self._unwritten is not None:
            make, self._unwritten = self._unwritten, None
            self._write(make())

    def _count(self, unread: UnreadStep) -> None:
        trainer, counts = self.trainer, self.trainer.counts
        reading, units, groups, step, is_trained_on = unread
        grad_norm, losses, gradients = reading.values
        if is_trained_on:
            self._unreached.take(groups, gradients, step=step, world=trainer.world)
        trainer.meter.end_step(losses, units, grad_norm=grad_norm)
        self._alerts.end_reading(grad_norm)
        if is_trained_on and not math.isfinite(grad_norm):
            counts.num_skipped_steps += 1
            if counts.num_skipped_steps > trainer.config.max_skipped_steps:
                raise TrainingError(
                    f"the gradient norm is {grad_norm} at step {step}, the {counts.num_skipped_steps}th time: lower "
                    "learning_rate, or raise max_skipped_steps"
                )

    def _end_step(self, *, is_stopped: bool) -> None:
        trainer = self.trainer
        control = trainer.callbacks.control
        self._flow.end_step(
            control, step=self._step, is_finished=trainer.is_finished, is_time_to_save=self._is_time_to_save
        )
        trainer.callbacks.call("on_step_end")
        trainer.callbacks.agree()
        self._leave_epoch()  # before a save
        trainer.counts.evaluation_pending = (
            trainer.config.eval_steps == "epoch"
            and (self._is_over or self._num_epochs > self._begun_epochs)
            and self._flow.evaluates_epoch(trainer.callbacks.control, epoch=trainer.data.epoch)
        )
        self._do_what_is_due(is_stopped=is_stopped)

    def _do_what_is_due(self, *, is_stopped: bool = False) -> None:
        callbacks = self.trainer.callbacks
        self.trainer.counts.evaluation_pending |= callbacks.control.should_evaluate
        if is_stopped:
            self._stop_run()
        if callbacks.control.should_log:
            self.log()
        if callbacks.control.should_evaluate:
            if callbacks.control.should_save:  # the evaluation may take long, and be killed
                self._save(tells=False)
            self._evaluate()
        if callbacks.control.should_save:
            self._save()

    def _stop_run(self) -> NoReturn:
        """Save the finished steps, unless they are saved, and raise StoppedError."""
        trainer = self.trainer
        if not self._step:
            raise StoppedError("told to stop by a signal before the first step: the same command begins again")
        control = trainer.callbacks.control  # a checkpoint under any settings
        control.should_training_stop, control.should_save, control.should_evaluate = True, True, False
        control.should_log |= trainer.config.logging_steps != "no"
        self._do_what_is_due()
        trainer.saver.wait()
        remedy = f"resume from it with train.resume={trainer.saver.latest}, or train(resume_from_checkpoint=…)"
        if self._is_automatic:
            remedy = "the same command resumes from it"
        pending = ", and begins with its evaluation" if trainer.counts.evaluation_pending else ""
        raise StoppedError(f"told to stop by a signal: step {self._step} is saved, {remedy}{pending}")

    def log(self) -> None:
        """End the record of the steps since the last record, if any; `read` writes the record."""
        trainer, counts = self.trainer, self.trainer.counts
        trainer.callbacks.control.should_log = False
        if self._logged == self._step:
            return
        self._logged = self._step
        figures, learning_rate = trainer.meter.end_record(), self._learning_rate
        self._unwritten = lambda: {
            "step": self._step,
            **figures(),
            "learning_rate": learning_rate,
            "tokens_seen": counts.tokens_seen,
            "samples_seen": counts.samples_seen,
            "num_skipped_steps": counts.num_skipped_steps,
        }
        if trainer.callbacks.reads_records or self._unread is None:
            self.read()

    def _write(self, record: dict[str, Any]) -> None:
        """Complete and write a record, while the counts of the run are still those of its last step."""
        trainer = self.trainer
        self._losses += record["loss"] * record["num_steps"]
        if trainer.config.log_sample_ids:
            record["sample_ids"] = self._gathered_ids(ids_on_host(self._batches))
        record |= self._alerts.of(record)
        if ALERTS in record and trainer.world.rank == 0:
            tell(record[ALERTS])
        if slow := trainer.run_log.take_alerts():  # which are logged already
            record[ALERTS] = [*slow, *record.get(ALERTS, [])]
        trainer.log(record)
        trainer.callbacks.agree()

    def _gathered_ids(self, mine: Sequence[tuple[str, int]]) -> list[Any]:
        """Return the sample ids of all ranks, sorted, with sources (or streams) if a run has several.

        mine: (source, sample id) of this rank.
        """
        world, sources = self.trainer.world, self.trainer.loader.sources
        gathered = gather_objects(list(mine), world.world_size)
        ids = sorted(sample for samples in gathered[:: world.replication] for sample in samples)
        is_named = max(len(sources), len(self.trainer.loader.urls)) > 1
        return [self.trainer.loader.name_of(*each) if is_named else each[1] for each in ids]

    def _evaluate(self) -> None:
        trainer = self.trainer
        trainer.callbacks.control.should_evaluate = False
        if not trainer.data.evaluations:
            raise ConfigError("a callback set should_evaluate, and there is no eval_dataset: pass one")
        self.read()
        metrics: Mapping[str, float] | None = None
        with suppress(StoppedError), trainer.phases.doing("evaluate"), trainer.meter.aside():
            with trainer.phases.until(self._stop):
                metrics = trainer.evaluate()
            trainer.run_log.write({"step": self._step, **metrics}, position=trainer.position)
        if metrics is None:
            self._stop_run()
        trainer.counts.evaluation_pending = False
        if trainer.best.take(metrics, step=self._step):
            if self._saved == self._step:
                trainer.best.checkpoint = trainer.saver.latest
            if trainer.config.save_steps == "best" or trainer.config.best.load:  # they need its checkpoint
                trainer.callbacks.control.should_save = True
        trainer.callbacks.agree()
        if (self._saved, self._is_saved_pending) != (self._step, True):
            return
        if trainer.saver.latest == trainer.saver.where(self._step):  # a checkpoint of this run
            self._is_saved_pending = False
            with trainer.phases.doing("save"), trainer.meter.aside():
                state = {**state_of(trainer), "evaluation_pending": False}
                trainer.saver.end_evaluation(self._step, state, beside=trainer.run_log.part(self._step))

    def _save(self, *, tells: bool = True) -> None:
        """Begin to save the finished steps, unless they are saved. tells: call on_save, after any evaluation."""
        trainer = self.trainer
        self._clock.restart()
        self.read()
        with trainer.phases.doing("save"), trainer.meter.aside():
            if self._saved != self._step:
                self._saved, self._is_saved_pending = self._step, trainer.counts.evaluation_pending
                if trainer.best.step == self._step:
                    trainer.best.checkpoint = trainer.saver.where(self._step)
                part = trainer.run_log.part(self._step) | (self._digests.part() if self._digests is not None else {})
                trainer.saver.save(self._step, state_of(trainer), best=trainer.best.step, beside=part)
            if tells:
                trainer.callbacks.control.should_save = False
                if trainer.callbacks.listens("on_save"):
                    trainer.saver.wait()
                trainer.callbacks.call("on_save")
        if tells:
            trainer.callbacks.agree()

    def _output(self) -> TrainOutput:
        """Return the output of transformers' Trainer, for the steps of this process."""
        trainer, counts = self.trainer, self.trainer.counts
        seconds = time.monotonic() - self._begun_s
        num_steps, num_samples = counts.step - self._first[0], counts.samples_seen - self._first[1]
        loss = self._losses / max(1, num_steps)
        metrics = {
            "train_runtime": seconds,
            "train_samples_per_second": num_samples / seconds,
            "train_steps_per_second": num_steps / seconds,
            "train_loss": loss,
            "epoch": trainer.data.epoch,
        }
        return TrainOutput(counts.step, loss, metrics)


@contextmanager
def step_digests(trainer: TrainerParts) -> Iterator[StepDigests | None]:
    """Open the file of the digests of steps, with a copy next to checkpoints outside of the output_dir.

    Yield None on ranks other than 0.
    """
    if trainer.world.rank:
        yield None
        return
    config = trainer.config
    kept_at = None if config.checkpoint_dir is None else trainer.saver.url
    with closing(StepDigests(Path(config.output_dir), step=trainer.counts.step, kept_at=kept_at)) as digests:
        yield digests
