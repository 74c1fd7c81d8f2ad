"""torchtitan's training loop on CPUs: its steps, losses, optimizer and checkpoints; a model of ours, and no GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.attention.flex_attention import create_mask
from torchtitan.tools import utils

utils.device_type, utils.device_module = "cpu", torch.cpu  # before the imports below take a GPU's

from lmms_stream import PackedLoader  # noqa: E402
from lmms_stream.doors.torchtitan import PackedDataLoader  # noqa: E402
from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.config.configs import TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division  # noqa: E402
from torchtitan.models.common.attention import (  # noqa: E402
    get_causal_mask_mod,
    get_efficient_causal_mask_mod_for_packed_document,
)
from torchtitan.trainer import Trainer  # noqa: E402

LOCAL_BATCH = 2


class MaskedModel(torch.nn.Module):
    """A model of transformers with the mask of torchtitan's flex attention, which runs backward on GPUs only."""

    def __init__(self, model: Any):
        super().__init__()
        self.inner = model

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rows, length = positions.shape
        of_documents, causal = get_efficient_causal_mask_mod_for_packed_document(positions), get_causal_mask_mod()
        mask = create_mask(of_documents, rows, 1, length, length, "cpu")
        mask &= create_mask(causal, rows, 1, length, length, "cpu")
        logits: torch.Tensor = self.inner(
            input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False
        ).logits
        return logits


class Noted:
    """Stands for torchtitan's metrics, which measure a GPU."""

    ntokens_since_last_log = 0

    def __init__(self, note: Callable[[int, float], None]):
        self.data_loading_times: list[float] = []
        self._note = note

    def should_log(self, step: int) -> bool:
        return True

    def log(self, step: int, global_avg_loss: float, *others: Any, **more: Any) -> None:
        self._note(step - 1, global_avg_loss)

    def close(self) -> None: ...


class CPUTrainer(Trainer):
    """torchtitan's Trainer with a setup of its own: `train` and all that it calls are torchtitan's."""

    def __init__(self, config: Any, model: Any, note: Callable[[int, float], None]):
        world_size = int(os.environ["WORLD_SIZE"])
        self.config, self.device, self.model_config = config, torch.device("cpu"), None
        self.parallel_dims = ParallelDims.from_config(config.parallelism, world_size)
        ranks, rank = 1, 0
        if self.parallel_dims.dp_enabled:
            mesh = self.parallel_dims.get_mesh("batch")
            ranks, rank = mesh.size(), mesh.get_local_rank()
        for each in (*model.inner.model.layers, model):
            fully_shard(each).set_force_sum_reduction_for_comms(True)  # gloo has no other
        disable_fsdp_gradient_division(model)
        self.model_parts = [model]
        self.gc_handler = utils.GarbageCollection()
        self.metrics_processor = Noted(note)
        self.loss_fn = config.loss.build(compile_config=config.compile)
        self.optimizers = config.optimizer.build(model_parts=self.model_parts)
        self.lr_schedulers = config.lr_scheduler.build(optimizers=self.optimizers, training_steps=config.training.steps)
        self.step = self.ntokens_seen = 0
        settings = config.training
        self.num_pipeline_parallel_microbatches = 1
        self.gradient_accumulation_steps = settings.global_batch_size // (settings.local_batch_size * ranks)
        self.dataloader = config.dataloader.build(
            dp_world_size=ranks,
            dp_rank=rank,
            tokenizer=None,
            seq_len=settings.seq_len,
            local_batch_size=settings.local_batch_size,
            snapshot_every_n_steps=config.checkpoint.interval * self.gradient_accumulation_steps,
        )
        self.checkpointer = config.checkpoint.build(
            dataloader=self.dataloader,
            model_parts=self.model_parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=config.dump_folder,
        )
        self.train_context, self.fwd_bwd_fn = nullcontext, self._forward_backward_body


def train(
    output: Path,
    model: Any,
    open_loader: Callable[..., PackedLoader],
    note: Callable[[int, float], None],
    *,
    seq_len: int,
    global_batch: int,
    num_steps: int,
    lr: float,
) -> None:
    """Train, from the last checkpoint on if there is any."""
    dist.init_process_group("gloo")
    dist_utils.set_pg_timeouts = lambda **options: None  # waits for GPUs
    config = Trainer.Config(
        dump_folder=str(output),
        training=TrainingConfig(
            local_batch_size=LOCAL_BATCH,
            global_batch_size=global_batch,
            seq_len=seq_len,
            steps=num_steps,
            disable_cuda_graphs=True,
        ),
        dataloader=PackedDataLoader.Config(open_loader=open_loader, global_batch_size=global_batch),
        loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=lr, betas=(0.9, 0.999), weight_decay=1e-2),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, min_lr_factor=1.0),
        checkpoint=CheckpointManager.Config(enable=True, interval=1, last_save_model_only=False, keep_latest_k=0),
    )
    trainer = CPUTrainer(config, MaskedModel(model), note)
    trainer.train()
    trainer.close()
    dist.destroy_process_group()
