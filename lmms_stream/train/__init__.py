"""Batches -> steps -> checkpoints, with FSDP2. Run by `torchrun … -m lmms_stream.train`.

run/            settings, processes, schedule of a run
model/          a transformers model on packs
checkpoint/     saved and resumed state
report/         reports of a run
run_config      a run in a single YAML file
inputs          inputs of a trainer: run, and functions to change parts; data: opened datasets
parts           parts of a trainer, built on first use, and methods for users to override
evaluate        the loss on evaluation datasets, and predictions for compute_metrics
trainer_state   the state of a trainer, saved and resumed; a model filled by a checkpoint
loop            a run of a trainer, step by step
trainer         PackedTrainer: train, evaluate, predict, save
launch          a run's file -> a trainer
torchrun        the command to start a run; torchrun for several ranks, and their end
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .trainer import PackedTrainer as PackedTrainer

_HOME = {"FSDP2SFTTrainer": ".doors.huggingface.trainer", "PackedTrainer": "trainer"}

__all__ = [*_HOME]

__getattr__, __dir__ = lazy_names(__name__, _HOME)
