"""A job: a run with a slow part, until an alert that names it is there, and a trace requested after the first step.

Arguments: the slow part, words of its alert (a busy machine may have alerts of other parts), then as of a run.

worker: worker 1 of each rank sleeps at each pack. data: workers of rank 1 do. disk: each read of a sample takes 20 ms.
rank: rank 1 sleeps in the forward of a layer. store: nothing here, its server throttles.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from lmms_stream.loader.collate import collate
from lmms_stream.mds.shard import Shard
from lmms_stream.train.report.run_log import TRACE_NAME
from lmms_stream.train.report.train_log import ALERTS_NAME
from lmms_stream.types import Batch
from torch.utils.data import get_worker_info
from transformers import TrainerCallback

from tests.train.runs import trainer_of

SLEEP_S = 0.3
READ_S = 0.02
RANK = os.environ["RANK"]


def slow_collate(*args: Any, **options: Any) -> Batch:
    """Collate; in a slow worker after a sleep. Packs are made sample by sample with any collator but the loader's."""
    worker = get_worker_info()
    if (worker is not None and (worker.id, sys.argv[1]) == (1, "worker")) or (RANK, sys.argv[1]) == ("1", "data"):
        time.sleep(SLEEP_S)
    return collate(*args, **options)


def read_slowly(shard: Shard, index: int, read: Any = Shard.__getitem__) -> Any:
    """Read a sample as from a slow disk, for which the process sleeps."""
    time.sleep(READ_S)
    return read(shard, index)


class EndsWithAlert(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        if (RANK, sys.argv[1]) == ("1", "rank"):
            model.model.layers[0].register_forward_pre_hook(lambda *_: time.sleep(SLEEP_S))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1 and state.is_world_process_zero:
            (Path(args.output_dir) / TRACE_NAME).touch()
        alerts = Path(args.output_dir) / ALERTS_NAME
        control.should_training_stop |= alerts.exists() and sys.argv[2] in alerts.read_text()


def main() -> None:
    if sys.argv[1] == "disk":
        Shard.__getitem__ = read_slowly  # type: ignore[method-assign]
    trainer_of(Path(sys.argv[3]), *sys.argv[4:], data_collator=slow_collate, callbacks=[EndsWithAlert()]).train()


if __name__ == "__main__":
    main()
