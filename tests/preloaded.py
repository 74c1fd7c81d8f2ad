"""What the server of processes.py imports before it forks: what readers and the ranks of jobs come to import.

Compiled loops are loaded, and some modules imported, when they are first used: so they are used here. That starts no
thread.
"""

from __future__ import annotations

import gc

import boto3  # noqa: F401
import lmms_stream.config
import lmms_stream.doors.huggingface.trainer
import lmms_stream.loader.loader
import lmms_stream.mds.packed
import lmms_stream.processors.chat
import lmms_stream.train.trainer  # noqa: F401
import numpy as np
import pydantic
import rich._emoji_codes  # noqa: F401
import streaming  # noqa: F401
from diffusers import AutoencoderKL, DiTTransformer2DModel  # noqa: F401
from lmms_stream.plan.packing import PackingConfig, pack
from lmms_stream.storage.s3 import _new_session
from lmms_stream.train.run_config import RunConfig

import tests.mds.reading
import tests.processes  # noqa: F401

pack(np.arange(1, 9, dtype=np.int32), config=PackingConfig(packing_length=16))
pydantic.TypeAdapter(RunConfig)
_new_session().client("s3", region_name="us-east-1")  # parses the descriptions of S3, which forked processes share
gc.freeze()  # a collection in a fork would copy the pages of all these modules
