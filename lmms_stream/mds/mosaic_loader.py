"""MosaicML Streaming's DataLoader over our dataset: batches, and the state of the dataset after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import ConfigError
from .mosaic import StreamingDataset
from .mosaic_bases import OfPackage, PlainLoader, one_sample
from .mosaic_settings import BLOCKS


class StreamingDataLoader(OfPackage, PlainLoader):
    """MosaicML Streaming's StreamingDataLoader, whose states are right in whatever world its dataset was given.

    ConfigError for batches of another size than the dataset's, where several workers or ranks share them: what was read
    would then not be what the position in a state says.
    """

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        dataset, size = self.dataset, 1 if self._gives_samples else self.batch_size
        if not isinstance(dataset, StreamingDataset) or size is None:
            return
        without = 1 if dataset.shuffle_algo == BLOCKS else size  # others say themselves that they need one
        own = dataset.batch_size or without
        if size != own and (self.num_workers > 1 or dataset.world.num_groups > 1):
            raise ConfigError(
                f"the loader's batches have {size} samples and the dataset's {own}, so its workers and ranks would "
                f"read other samples than a state says: give the dataset batch_size={size}"
            )

    @property
    def _gives_samples(self) -> bool:
        """Whether it makes no batches, and the dataset none either."""
        dataset = self.dataset
        is_ours = isinstance(dataset, StreamingDataset) and type(dataset).__iter__ is StreamingDataset.__iter__
        return self.batch_sampler is None and is_ours

    def _samples_of(self) -> Callable[[Any, Any], int]:
        return one_sample if self._gives_samples else super()._samples_of()

    def state_dict(self) -> dict[str, Any] | None:
        if not isinstance(self.dataset, StreamingDataset):
            return super().state_dict()
        return self.dataset.state_dict(self.num_samples_yielded * self.dataset.world.num_groups, False)
