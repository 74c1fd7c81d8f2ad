"""Number formats and determinism of a run's computation."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from ...errors import ConfigError
from .settings import TrainConfig

logger = logging.getLogger("lmms_stream")


def with_precision(config: TrainConfig) -> TrainConfig:
    """Return the config with bf16 decided; unset, True on GPUs with bfloat16."""
    if config.bf16 is not None:
        return config
    return replace(config, bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported())


def with_float32(policy: MixedPrecisionPolicy, kept: set[int]) -> MixedPrecisionPolicy:
    """Return the policy, with float32 for the parameters of some ids; unchanged before torch 2.15."""
    if not hasattr(policy, "param_dtype_override_fn"):
        return policy
    return replace(policy, param_dtype_override_fn=lambda each: each.dtype if id(each) in kept else None)


def check_formats(parts: Sequence[torch.nn.Module]) -> None:
    """Raise ConfigError if trained parameters of a part, without those of earlier parts, have several formats."""
    seen: set[torch.nn.Parameter] = set()
    for part in parts:
        own = {each for each in part.parameters() if each.requires_grad} - seen
        seen |= own
        formats = sorted({str(each.dtype).removeprefix("torch.") for each in own})
        if len(formats) > 1:
            raise ConfigError(
                f"the model has weights in {' and '.join(formats)} next to each other, and FSDP trains the weights "
                "of a block in one format: set model.dtype to float32, and train.bf16 to true to compute in bfloat16"
            )


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
