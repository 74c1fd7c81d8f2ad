"""MosaicML Streaming's DataLoader over our dataset: batches, and the state of the dataset after them."""

from __future__ import annotations

from typing import Any

import streaming

from .mosaic import StreamingDataset


class StreamingDataLoader(streaming.StreamingDataLoader):  # type: ignore[misc]
    """MosaicML Streaming's StreamingDataLoader, whose states are right in whatever world its dataset was given."""

    def state_dict(self) -> dict[str, Any] | None:
        if not isinstance(self.dataset, StreamingDataset):
            state: dict[str, Any] | None = super().state_dict()
            return state
        return self.dataset.state_dict(self.num_samples_yielded * self.dataset.world.num_groups, False)
