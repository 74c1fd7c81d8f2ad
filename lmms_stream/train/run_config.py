"""A training run as one YAML file: its datasets, its model, and how it is trained."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import ConfigError
from ..mds.dataset_config import DatasetConfig
from ..types import World
from .model.model import ModelConfig
from .run.settings import Datasets, TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A training run as one YAML file, with one dataset or several by name. eval_dataset: what the loss is told of."""

    dataset: DatasetConfig | None = None
    datasets: dict[str, DatasetConfig] = field(default_factory=dict)
    eval_dataset: DatasetConfig | None = None
    model: ModelConfig
    train: TrainConfig

    def __post_init__(self) -> None:
        if (self.dataset is None) == (not self.datasets):
            raise ConfigError("a run needs exactly one of dataset and datasets")
        if self.train.eval_steps and self.eval_dataset is None:
            raise ConfigError("train.eval_steps needs an eval_dataset: name one, or set eval_steps to 0")

    def build_datasets(self, world: World) -> Datasets:
        if self.dataset is not None:
            return self.dataset.open(world)
        return {name: config.open(world) for name, config in self.datasets.items()}
