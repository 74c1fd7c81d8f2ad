"""A job: a run that writes down its packs. Its arguments are those of `python -m lmms_stream.train`.

Each rank appends a line a step to OUTPUT_DIR/packs-N.jsonl: {"step": …, "packs": [[sample ids, segments, tokens,
labels], …]}, where segments are the bounds of the samples.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmms_stream.config import build_config, load_mapping
from lmms_stream.doors.huggingface.trainer import FSDP2SFTTrainer
from lmms_stream.loader.worker_server import fork_worker_server
from lmms_stream.train.run.distributed import end_distributed, init_distributed
from lmms_stream.train.run_config import RunConfig
from lmms_stream.types import Batch


class Recorded(FSDP2SFTTrainer):
    def training_step(self, packs: Sequence[Batch], units: Any) -> Any:
        line = {"step": self.step, "packs": [_shown(pack) for pack in packs if len(pack.sample_ids)]}
        with Path(self.config.output_dir, f"packs-{self.world.rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return super().training_step(packs, units)


def _shown(pack: Batch) -> list[Any]:
    return [pack.sample_ids.tolist(), pack.sample_bounds, pack.input_ids[0].tolist(), pack.labels[0].tolist()]


def main() -> None:
    logging.basicConfig(format="%(message)s")
    path = Path(sys.argv[1])
    config = build_config(RunConfig, load_mapping(path, sys.argv[2:]), source=str(path))
    if config.train.num_workers:
        fork_worker_server()
    world, _ = init_distributed(config.train.timeout_s)
    Recorded(model=config.model, args=config.train, train_dataset=config.build_datasets(world)).train()
    end_distributed()


if __name__ == "__main__":
    main()
