"""A job: FSDP2SFTTrainer.evaluate before any step, for each of some cases; then a run of the last one.

Its arguments are a run's config and a JSON file: {name: {"overrides": […], "on": […]}}, where "on" are world sizes.
Beside that comes `<world size>-<rank>.json` with what it gave by case, or the error, and `predicted-….npz` with what
predict gave after the run. The run is in the config's output_dir.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lmms_stream.errors import LmmsStreamError
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.run.distributed import end_distributed, init_distributed

from tests.train.runs import trainer_of

TIMEOUT_S = 60.0


def main() -> None:
    config, job = Path(sys.argv[1]), Path(sys.argv[2])
    world, _ = init_distributed(TIMEOUT_S)
    made: dict[str, Any] = {}
    for name, case in json.loads(job.read_text()).items():
        if world.world_size not in case["on"]:
            continue
        try:
            trainer = trainer_of(config, *case["overrides"])
            made[name] = trainer.evaluate()
        except LmmsStreamError as error:
            made[name] = {"error": str(error)}
    (job.parent / f"{world.world_size}-{world.rank}.json").write_text(json.dumps(made))
    torch.manual_seed(world.rank)
    output = f"train.output_dir={job.parent / f'run-{world.world_size}'}"
    trainer = trainer_of(config, output)
    trainer.train()
    predicted: Any = trainer.predict(trainer.data.evaluations[""])
    np.savez(
        job.parent / f"predicted-{world.world_size}-{world.rank}",
        predictions=predicted.predictions,
        labels=predicted.label_ids,
        loss=predicted.metrics["test_loss"],
    )
    assert trainer.evaluate()["eval_loss"] == read_log(Path(trainer.args.output_dir))[-1]["eval_loss"]


if __name__ == "__main__":
    main()
    end_distributed()
    assert not dist.is_initialized()
