"""The arguments of the constructor of FSDP2SFTTrainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...processors.base import Compared


@dataclass(frozen=True, kw_only=True)
class TrainerInputs:
    """The arguments of a trainer. objective: that of its task, where the task compares answers."""

    model: Any = None
    args: Any = None
    train_dataset: Any = None
    eval_dataset: Any = None
    data_collator: Any = None
    processing_class: Any = None
    formatting_func: Callable[..., Any] | None = None
    peft_config: Any = None
    quantization_config: Any = None
    objective: Compared | None = None
