"""What the constructor of a trainer got, and what a run needs of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ...loader.batch_maker import Collator
from ...processors.base import Compared
from ..model.build import ModelConfig
from ..run.settings import Datasets, TrainConfig

if TYPE_CHECKING:
    from transformers import TrainingArguments


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the constructor of a trainer got. objective: of its task, where that compares answers."""

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


def _as_it_is(given: Any) -> Any:
    return given


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """What a run needs.

    arguments: theirs, as given, or as transformers would have them of a TrainConfig; None where all is in our words.
    processing_class: what makes the tokens, as the arguments change it; None with datasets of ours. token_ids: of the
    end of a text and of padding, as the model's config is to have them. has_dropout: whether modules of dropout drop.
    open_rows: makes packs of rows that are evaluated later, as of those of eval_dataset.
    """

    config: TrainConfig
    arguments: TrainingArguments | None
    model: ModelConfig | torch.nn.Module | None
    train_dataset: Datasets | None
    eval_dataset: Datasets | None
    data_collator: Collator | None
    processing_class: Any = None
    token_ids: Mapping[str, int] = field(default_factory=dict)
    has_dropout: bool = True
    open_rows: Callable[[Any], Any] = _as_it_is
