"""Models whose matrices are not cut over ranks, in this process alone. Those that are: tests/jobs/."""

from __future__ import annotations

import pytest
import torch
from lmms_stream.errors import ConfigError
from lmms_stream.train.model.build import PlainModel
from lmms_stream.train.model.sharding import shard_model
from lmms_stream.train.run.distributed import end_distributed, init_distributed
from lmms_stream.train.run.mesh import Meshes
from lmms_stream.train.run.settings import TrainConfig
from torch.distributed.device_mesh import init_device_mesh


def test_a_model_that_writes_no_text_is_not_cut() -> None:
    _, device = init_distributed(60.0)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("shard", "tp"))
        config = TrainConfig(output_dir="out", global_batch=1, max_steps=1)
        model = PlainModel(torch.nn.Sequential(torch.nn.Linear(2, 2)))
        message = "train.tensor_parallel 1 is for language models, and this is a Sequential: set it to 1"
        with pytest.raises(ConfigError, match=message):
            shard_model(model, Meshes(fsdp=mesh["shard"], tp=mesh["tp"]), config=config, device=device)
    finally:
        end_distributed()
