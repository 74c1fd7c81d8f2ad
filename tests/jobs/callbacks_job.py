"""A job: runs with callbacks of transformers. Arguments: a run's config, a folder, and the step of a kill (0: none).

First a run that stops early, resumed where it was killed before; then one that a callback of rank 1 alone stops. In the
folder come `<run>-<rank>.json` with what each rank saw, and `events.json` of a run beside transformers' own Trainer.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lmms_stream.train.model.build import ModelConfig
from lmms_stream.train.run.distributed import end_distributed, init_distributed
from transformers import EarlyStoppingCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments

from tests.train.runs import MODEL, trainer_of

TIMEOUT_S = 60.0
BEST_STEP = 6
EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]


class Recorder(TrainerCallback):
    """Keeps which events came, and at which step."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []


def _recording(name: str) -> Any:
    def record(self: Recorder, args: Any, state: Any, control: Any, **given: Any) -> None:
        assert isinstance(args, TrainingArguments)
        assert name == "on_init_end" or {"model", "optimizer", "lr_scheduler", "processing_class"} <= given.keys()
        self.events.append((name, state.global_step))

    return record


for event in EVENTS:
    setattr(Recorder, event, _recording(event))


class OfOneRank(TrainerCallback):
    """On rank 1 alone it wants a checkpoint, or the end of the run, after a step, and then logs figures of its own."""

    log: Callable[[dict[str, Any]], object] = dict

    def __init__(self, rank: int, *, saves_at: int = 0, stops_at: int = 0):
        self.rank, self.saves_at, self.stops_at = rank, saves_at, stops_at

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.rank == 1 and state.global_step == self.saves_at:
            control.should_save = True
        if self.rank == 1 and state.global_step == self.stops_at:
            control.should_training_stop = True
            self.log({"step": state.global_step, "of_one": 1.0})


class Kill(TrainerCallback):
    """Kills its rank after a step."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def stop_early(config: Path, folder: Path, rank: int, killed_at: int) -> dict[str, Any]:
    """A run whose metric is the distance to BEST_STEP."""
    recorder, early = Recorder(), EarlyStoppingCallback(early_stopping_patience=3)

    def distance(_: Any) -> dict[str, float]:
        return {"distance": abs(trainer.step - BEST_STEP)}

    trainer = trainer_of(
        config,
        f"train.output_dir={folder / 'early'}",
        callbacks=[early, ProgressCallback, recorder, OfOneRank(rank, saves_at=3), Kill(killed_at)],
        compute_metrics=distance,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    output = trainer.train()
    return {
        "events": recorder.events,
        "counter": early.early_stopping_patience_counter,
        "step": output.global_step,
        "best": [trainer.state.best_metric, trainer.state.best_global_step],
        "log_history": [[each["step"], sorted(each)] for each in trainer.state.log_history],
        "eval_loss": trainer.evaluate()["eval_loss"],
    }


def stop_by_one(config: Path, folder: Path, rank: int) -> dict[str, Any]:
    """The callback is given to rank 1 alone."""
    callback = OfOneRank(rank, saves_at=2, stops_at=3)
    settings = ["train.save_steps=0", "train.eval_steps=no", "train.best.load=false"]
    trainer = trainer_of(config, f"train.output_dir={folder / 'one'}", *settings, callbacks=[callback] * rank)
    callback.log = trainer.log
    return {"step": trainer.train().global_step}


def events_beside_transformers(config: Path, folder: Path) -> dict[str, list[tuple[str, int]]]:
    """Of a run of four steps, by our trainer and by transformers'."""
    ours, theirs = Recorder(), Recorder()
    settings = ["train.global_batch=2", "train.max_steps=4", "train.save_steps=2", "train.best.load=false"]
    trainer = trainer_of(config, f"train.output_dir={folder / 'ours'}", *settings, callbacks=[ours])
    trainer.train()
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 64
    arguments = TrainingArguments(
        str(folder / "theirs"), max_steps=4, gradient_accumulation_steps=2, per_device_train_batch_size=1,
        logging_steps=1, eval_strategy="steps", eval_steps=2, save_steps=2, report_to="none", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    model = ModelConfig(config=MODEL).build()
    Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:3], callbacks=[theirs]).train()
    return {"ours": ours.events, "theirs": theirs.events}


def main() -> None:
    config, folder, killed_at = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    world, _ = init_distributed(TIMEOUT_S)
    if world.world_size == 1:
        (folder / "events.json").write_text(json.dumps(events_beside_transformers(config, folder)))
        return
    (folder / f"early-{world.rank}.json").write_text(json.dumps(stop_early(config, folder, world.rank, killed_at)))
    (folder / f"one-{world.rank}.json").write_text(json.dumps(stop_by_one(config, folder, world.rank)))


if __name__ == "__main__":
    main()
    end_distributed()
