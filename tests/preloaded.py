"""What the server of processes.py imports before it forks: what readers and the ranks of jobs come to import.

Some modules are imported when they are first used: so they are used here. That starts no thread.
"""

from __future__ import annotations

import gc
from pathlib import Path

import boto3  # noqa: F401
import lmms_stream.doors.huggingface.trainer
import lmms_stream.processors.chat
import lmms_stream.processors.token_kernels
import lmms_stream.train.trainer  # noqa: F401
import pydantic
import rich._emoji_codes  # noqa: F401
import streaming  # noqa: F401
import torch
import torch.distributed as dist
from diffusers import AutoencoderKL, DiTTransformer2DModel  # noqa: F401
from lmms_stream.storage.s3 import _new_session
from lmms_stream.train.run_config import RunConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import tests.mds.reading
import tests.processes  # noqa: F401
from tests.kept_schemas import keep_schemas


def _share_a_step() -> None:
    """Prepare torch's operations of a step that two ranks share: a rank finds how its shards follow from others."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    dist.destroy_process_group()


keep_schemas()
pydantic.TypeAdapter(RunConfig)
_new_session().client("s3", region_name="us-east-1")  # parses the descriptions of S3, which forked processes share
_share_a_step()
assert len(list(Path("/proc/self/task").iterdir())) == 1
gc.freeze()  # a collection in a fork would copy the pages of all these modules
