"""MosaicML Streaming's DataLoader over our dataset: batches, and the state of the dataset after them."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from .mosaic import StreamingDataset
from .mosaic_bases import PlainLoader


class StreamingDataLoader(PlainLoader):
    """MosaicML Streaming's StreamingDataLoader, whose states are right in whatever world its dataset was given.

    ConfigError for batches of another size than the dataset's, where several workers or ranks share them: what was read
    would then not be what the position in a state says.
    """

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        dataset, size = self.dataset, self.batch_size
        if (
            not isinstance(dataset, StreamingDataset)
            or dataset.batch_size is None
            or size in (None, dataset.batch_size)
        ):
            return  # without one the dataset says what is wrong
        if self.num_workers > 1 or dataset.world.num_groups > 1:
            raise ConfigError(
                f"the loader's batches have {size} samples and the dataset's {dataset.batch_size}, so its workers and "
                f"ranks would read other samples than a state says: give the dataset batch_size={size}"
            )

    def state_dict(self) -> dict[str, Any] | None:
        if not isinstance(self.dataset, StreamingDataset):
            return super().state_dict()
        return self.dataset.state_dict(self.num_samples_yielded * self.dataset.world.num_groups, False)
