"""What the server of processes.py imports before it forks: what readers and the ranks of jobs come to import."""

from __future__ import annotations

import boto3  # noqa: F401
import lmms_stream.config
import lmms_stream.loader.loader
import lmms_stream.mds.packed
import lmms_stream.processors.chat
import lmms_stream.train.trainer  # noqa: F401
import rich._emoji_codes  # noqa: F401
import streaming  # noqa: F401
import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2  # noqa: F401

import tests.mds.reading
import tests.processes  # noqa: F401
