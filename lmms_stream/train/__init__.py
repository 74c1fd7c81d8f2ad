"""Batches -> steps -> checkpoints, with FSDP2. `torchrun … -m lmms_stream.train` runs it.

run/            settings, processes, schedule of a run
model/          a transformers model as it runs on packs
checkpoint/     what is saved and resumed
report/         what a run reports
run_config      a run as one YAML file
inputs          inputs of a trainer: its run, and functions that change it; data: its opened datasets
parts           parts of a trainer, built on first use, and methods that users override
evaluate        the loss on evaluation datasets, and predictions for compute_metrics
trainer_state   the state of a trainer, saved and resumed; a model that a checkpoint fills
loop            one run of a trainer, step by step
trainer         PackedTrainer: train, evaluate, predict, save
launch          a run's file -> its trainer
torchrun        the command that starts a run; torchrun for several ranks, and their end
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .trainer import PackedTrainer as PackedTrainer

_HOME = {"FSDP2SFTTrainer": ".doors.huggingface.trainer", "PackedTrainer": "trainer"}

__all__ = [*_HOME]

__getattr__, __dir__ = lazy_names(__name__, _HOME)
