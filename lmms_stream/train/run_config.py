"""A training run in a YAML file: datasets, model, training settings and task."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import ConfigError
from ..mds.dataset_config import DatasetConfig
from ..mds.mixed import check_mixing
from ..registry import imported
from ..types import World
from .model.build import ModelConfig
from .run.settings import Datasets, Packed, TrainConfig
from .tasks.registry import CAUSAL, build_task
from .tasks.task import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A training run in a YAML file, with a dataset or several named datasets. eval_dataset: evaluation data.

    task: the name and options of a task, for example {type: flow_matching, vae: …} (default: the task of the datasets'
    processors).
    """

    dataset: DatasetConfig | None = None
    datasets: dict[str, DatasetConfig] = field(default_factory=dict)
    eval_dataset: DatasetConfig | None = None
    model: ModelConfig
    train: TrainConfig
    task: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.dataset is None) == (not self.datasets):
            raise ConfigError("a run needs exactly one of dataset and datasets")
        if self.train.mixing == "samples":
            check_mixing(self.train.weights, self.train.max_epochs)
            if not self.datasets:
                raise ConfigError("train.mixing is samples, which mixes several datasets: name them in datasets")
        if self.eval_dataset is not None and self._evaluated is not None:
            raise ConfigError("eval_dataset and dataset.eval_dataset_path both set the evaluation data: leave one out")
        if (
            isinstance(self.train.eval_steps, int)
            and self.train.eval_steps
            and self.eval_dataset is None
            and self._evaluated is None
        ):
            raise ConfigError("train.eval_steps needs an eval_dataset: name one, or set eval_steps to 0")

    def build_task(self) -> Task | None:
        """Build the task; None if the datasets specify the task."""
        if not self.task:
            return None
        options = dict(self.task)
        name = options.pop("type", None)
        if not isinstance(name, str):
            raise ConfigError("task needs type, the name of a task: set it, for example to flow_matching")
        if name == CAUSAL:
            options.setdefault("z_loss", self.train.z_loss)
        return build_task(name, options)

    def build_datasets(self, world: World) -> Datasets:
        if self.dataset is not None:
            return opened(self._trusting(self.dataset), world)
        return {name: opened(self._trusting(config), world) for name, config in self.datasets.items()}

    def build_eval_dataset(self, world: World) -> Datasets | None:
        config = self.eval_dataset or self._evaluated
        return None if config is None else opened(self._trusting(config), world)

    def _trusting(self, config: DatasetConfig) -> DatasetConfig:
        """Return the config of a dataset, with a trusted processor if the model is trusted."""
        if not self.model.trust_remote_code:
            return config
        return replace(config, processor=replace(config.processor, trust_remote_code=True))

    @property
    def _evaluated(self) -> DatasetConfig | None:
        return None if self.dataset is None else self.dataset.evaluated


def opened(config: DatasetConfig, world: World) -> Packed:
    """Open the dataset of a config; a config with a source_type is opened by the Hugging Face door."""
    if config.source_type is None:
        return config.open(world)
    made: Packed = imported("doors.huggingface.data:open_config")(config, world)
    return made
