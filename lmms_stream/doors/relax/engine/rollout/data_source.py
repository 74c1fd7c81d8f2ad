"""Relax's data sources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ...base import BaseDataset
from ...data_source import RolloutDataSource, RolloutDataSourceWithBuffer, pop_first
from ...in_flight import Group
from ...opening import open_dataset
from ...prompts import MultimodalConfig

__all__ = ["DataSource", "RolloutDataSource", "RolloutDataSourceWithBuffer", "pop_first"]


class DataSource(ABC):
    """Interface of a class for --data-source-path."""

    @abstractmethod
    def get_samples(self, num_samples: int) -> list[Group]: ...

    @abstractmethod
    def add_samples(self, samples: list[Group]) -> None: ...

    @abstractmethod
    def save(self, rollout_id: int) -> None: ...

    @abstractmethod
    def load(self, rollout_id: int | None = None) -> None: ...

    @abstractmethod
    def __len__(self) -> int: ...


DataSource.register(RolloutDataSource)


def _create_dataset(
    args: Any, tokenizer: Any, processor: Any, multimodal_config: MultimodalConfig | None = None
) -> BaseDataset:
    given = {"multimodal_config": multimodal_config} if multimodal_config is not None else {}
    return open_dataset(args, tokenizer=tokenizer, processor=processor, **given)
