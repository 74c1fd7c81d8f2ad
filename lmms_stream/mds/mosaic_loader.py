"""MosaicML Streaming's DataLoader over our dataset: batches, and the state of the dataset after them."""

from __future__ import annotations

from typing import Any

from .mosaic import StreamingDataset
from .mosaic_bases import LoaderBase


class StreamingDataLoader(LoaderBase):
    """MosaicML Streaming's StreamingDataLoader, whose states are right in whatever world its dataset was given."""

    def state_dict(self) -> dict[str, Any] | None:
        if not isinstance(self.dataset, StreamingDataset):
            return super().state_dict()
        return self.dataset.state_dict(self.num_samples_yielded * self.dataset.world.num_groups, False)
