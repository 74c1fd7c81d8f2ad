"""A job: own loops on two ranks whose packs differ: at a step a rank has one sample, and the other rank several.

Arguments: the dataset; a folder for a checkpoint; "now", or "as-before" for a for_model that looks at the rank's own
pack.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from lmms_stream import PackedLoader, PackedStreamingDataset, PackingConfig, TokensProcessor, check_isolation
from lmms_stream.errors import ConfigError
from lmms_stream.loader.collate import collate
from lmms_stream.processors.base import Processor
from lmms_stream.train.checkpoint.checkpoint import Checkpointer
from lmms_stream.train.model import choice
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from ..train import vision

STEPS = 3
TINY = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
BART = {"vocab_size": 64, "d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "pad_token_id": 0}


def built(model_type: str, fields: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **fields)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    return model


def train(data: str, model: Any, *, max_samples: int | None = None, saved_to: Path | None = None) -> list[int]:
    """Return the samples in this rank's pack of each step. saved_to: folder for a checkpoint of the end."""
    packing = PackingConfig(packing_length=64, max_samples_per_pack=max_samples)
    dataset = PackedStreamingDataset(data, processor=TokensProcessor(), packing=packing, shuffle=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in PackedLoader(dataset, global_batch=2).steps(until=STEPS):
        for batch in step.batches:
            found.append(batch.num_segments)
            arguments = batch.for_model(model, labels=True)
            (2 * model(**arguments, num_items_in_batch=step.num_loss_tokens).loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    if saved_to is not None:
        with Checkpointer(str(saved_to), staging=saved_to / "staging") as checkpointer:
            checkpointer.save(model, optimizer, step=STEPS, state={}, documents={})
    return found


def refusals() -> list[str]:
    """Return the errors of models, batches and processors that only some ranks could prove, or could not."""
    batch = collate([{"input_ids": np.arange(length), "labels": np.arange(length)} for length in (5, 6)], [0, 1])
    broken = built("llama", TINY)
    config = AutoConfig.for_model(**vision.model_config("qwen2_5_vl"))
    of_media = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")
    if dist.get_rank() == 1:
        broken.get_output_embeddings().weight.data.fill_(torch.nan)
    batch.for_model(of_media)
    processor = SimpleNamespace(family=vision.Family("qwen2_5_vl"))
    found = []
    for tried, model, of in (
        (batch, broken, None),
        (replace(batch, holds_one=True), built("llama", TINY), None),
        (batch, of_media, processor),
    ):
        try:
            tried.for_model(model, of)
        except ConfigError as error:
            found.append(str(error))
    check_isolation(of_media, batch, cast(Processor, processor))
    batch.for_model(of_media, processor)
    return found


def faults_of_a_rank() -> list[str]:
    """Return the errors of proofs in which the memory of rank 1 runs out, each in a later forward pass."""
    batch = collate([{"input_ids": np.arange(length), "labels": np.arange(length)} for length in (5, 6)], [0, 1])
    found: list[str] = []
    for passes in itertools.count():
        model, left = built("llama", TINY), iter(range(passes))

        def run_out(*_: Any, left: Any = left) -> None:
            if dist.get_rank() == 1 and next(left, None) is None:
                raise torch.OutOfMemoryError("out of memory")

        model.register_forward_pre_hook(run_out)
        try:
            batch.for_model(model)
        except ConfigError as error:
            found.append(str(error))
        else:
            break
    return found


def main(data: str, folder: str, way: str) -> None:
    dist.init_process_group("gloo")
    if way == "as-before":
        choice._needs_proof = lambda known, batch: len(batch.cu_seqlens) > 2
    several = [train(data, torch.nn.parallel.DistributedDataParallel(built("llama", TINY)))]
    sharded = built("llama", TINY)
    fully_shard(sharded)
    several.append(train(data, sharded, saved_to=Path(folder)))
    bart = torch.nn.parallel.DistributedDataParallel(built("bart", BART), find_unused_parameters=True)
    one = train(data, bart, max_samples=1)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(
        everyone, {"several": several, "one": one, "refused": refusals(), "memory": faults_of_a_rank()}
    )
    if dist.get_rank() == 0:
        print(everyone, flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
