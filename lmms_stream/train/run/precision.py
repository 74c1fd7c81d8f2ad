"""Number formats and determinism of a run's computation."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import torch
import torch.distributed as dist

from .settings import TrainConfig

logger = logging.getLogger("lmms_stream")


def with_precision(config: TrainConfig) -> TrainConfig:
    """Return the config with bf16 decided; unset, True on GPUs with bfloat16."""
    if config.bf16 is not None:
        return config
    return replace(config, bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported())


def set_deterministic(config: TrainConfig) -> None:
    """Let torch run only deterministic kernels in this process, if config asks; call this before the first kernel.

    torch raises a RuntimeError with the name of an operation without a deterministic kernel. On GPUs the sums of
    attention's backward pass have another order in each run otherwise.
    """
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS at its start
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def set_tf32(config: TrainConfig, device: torch.device) -> None:
    """Set and log the float32 matmul precision of a GPU; do nothing on CPUs."""
    if device.type != "cuda":
        return
    if config.tf32 or (config.tf32 is None and config.bf16):
        torch.set_float32_matmul_precision("high")
    elif config.tf32 is False:
        torch.set_float32_matmul_precision("highest")
    if not dist.is_initialized() or dist.get_rank() == 0:
        computed = "bfloat16" if config.bf16 else "the format of the parameters"
        logger.info("numbers: computed in %s; products of float32 numbers in TF32: %s", computed,
                    "yes" if uses_tf32(device) else "no")  # fmt: skip


def uses_tf32(device: torch.device) -> bool:
    """Whether products of float32 numbers are rounded to TF32 on a device."""
    return device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
