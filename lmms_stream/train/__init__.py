"""Batches -> steps -> checkpoints, with FSDP2. `torchrun … -m lmms_stream.train` runs it.

run/            how a run trains, its processes, its schedule
model/          a transformers model as it is run on packs
reference/      what a task compares the model with; referenced: that of a run
checkpoint/     what is saved and resumed
report/         what a run tells
habits/         what users of transformers and TRL give, as a run needs it
run_config      a run as one YAML file
functions       what a trainer was given; data: its datasets, opened
protocol        what the files below see of a trainer
evaluate        the loss on datasets that are not trained on; predictions: what compute_metrics makes of them
filled          a model that a checkpoint fills, without weights
parts           what a trainer builds when it is first asked for; standing: where it stands, saved and resumed
members         of transformers' Trainer, that scripts call and that do not train
loop            one run of a trainer, step by step
trainer         FSDP2SFTTrainer: what is given, built, and may be changed
limits/         a run's config -> which part of the run is its limit
launched        a run that LMMS Engine's launch file describes
prepared        a run's file -> its trainer
launch          the command that starts a run; torchrun: of several ranks, which it tells to stop
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .trainer import FSDP2SFTTrainer as FSDP2SFTTrainer

_HOME = {"FSDP2SFTTrainer": "trainer"}

__all__ = [*_HOME]

__getattr__, __dir__ = lazy_names(__name__, _HOME)
