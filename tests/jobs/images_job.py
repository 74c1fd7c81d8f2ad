"""A job: a run whose decoder learns to make images again, by a discriminator too. It takes a YAML file and overrides.

The file has the sections dataset and train of a run; the encoder is in the folder `encoder` beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lmms_stream.config import build_config, load_mapping
from lmms_stream.mds.dataset_config import DatasetConfig
from lmms_stream.train.habits.opened import opened
from lmms_stream.train.run.distributed import init_distributed
from lmms_stream.train.run.settings import TrainConfig
from lmms_stream.train.tasks.reconstruction import Reconstruction
from lmms_stream.train.tasks.terms import L1, HingeGAN
from lmms_stream.train.trainer import FSDP2SFTTrainer

from tests.train.images import adversary


def main() -> None:
    path = Path(sys.argv[1])
    said: dict[str, Any] = load_mapping(path, sys.argv[2:])
    config = build_config(TrainConfig, said["train"], source=str(path))
    world, _ = init_distributed(config.timeout_s)
    dataset = opened(build_config(DatasetConfig, said["dataset"], source=str(path)), world)
    task = Reconstruction(
        encoder=path.parent / "encoder", terms=[L1(), HingeGAN(discriminator_from_step=1, from_step=2)]
    )
    FSDP2SFTTrainer(model=adversary(), args=config, train_dataset=dataset, task=task).train()


if __name__ == "__main__":
    main()
