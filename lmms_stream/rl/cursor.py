"""IndexManager: an epoch, the order of its rows, and the position that batches have reached. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, CursorError, DataError
from .permutation import ORDERS, Order, Permutation


class IndexManager:
    """The cursor of a dataset of total_size rows, by Relax's names.

    shuffle: whether each epoch has an order of its own; else it is that of the rows. order, last: see Permutation.
    """

    def __init__(
        self,
        total_size: int,
        seed: int = 42,
        *,
        shuffle: bool = True,
        order: Order = "own",
        last: NDArray[np.int64] | None = None,
    ):
        if order not in ORDERS:
            raise ConfigError(f"order must be {' or '.join(map(repr, ORDERS))}, got {order!r}")
        self.total_size = total_size
        self.seed = seed
        self.order = order
        self.last = last
        self._orders: dict[str, Permutation] = {}  # the last two, of this epoch and the next
        self.begin(0, is_shuffled=shuffle)

    def begin(self, epoch_id: int, *, is_shuffled: bool, position: int = 0) -> None:
        """Stand at a position of an epoch."""
        self.check(epoch_id, position)
        self.current_epoch = epoch_id
        self.is_shuffled = is_shuffled
        self.position = position  # rows of the epoch that batches have passed
        self.permutation = self.of_epoch(epoch_id)

    def check(self, epoch_id: int, position: int) -> None:
        """CursorError where there is no such position."""
        if not 0 <= position <= self.total_size or epoch_id < 0:
            raise CursorError(
                f"the state stands at row {position} of epoch {epoch_id}, where there is none ({self.total_size} "
                "rows): it is damaged, or of other data; take another, or begin anew"
            )

    def of_epoch(self, epoch_id: int) -> Permutation:
        """The order of any epoch."""
        name, epoch = self.name_of(epoch_id), epoch_id if self.is_shuffled else None
        if name not in self._orders:
            made = Permutation(self.total_size, seed=self.seed, epoch=epoch, order=self.order, last=self.last)
            self._orders = dict([*self._orders.items()][-1:]) | {name: made}
        return self._orders[name]

    def name_of(self, epoch_id: int) -> str:
        """Names the order of an epoch: the same name, the same order."""
        return f"{self.order} {'' if self.last is None else len(self.last)} {epoch_id if self.is_shuffled else ''}"

    @property
    def indices(self) -> list[int]:
        """The rows of the epoch in their order."""
        return [*map(int, self.permutation.between(0, self.total_size))]

    def shuffle(self, epoch_id: int) -> None:
        """Begin an epoch, in an order that seed and epoch alone tell; nothing where it is that of this epoch."""
        if epoch_id < 0:
            raise ConfigError(f"an epoch's number must be at least 0, got {epoch_id}")
        if not self.is_shuffled or epoch_id != self.current_epoch:
            self.begin(epoch_id, is_shuffled=True)

    def reset(self, position: int = 0, epoch_id: int = 0) -> None:
        """Stand at a position of a shuffled epoch."""
        self.begin(epoch_id, is_shuffled=True, position=position)

    def next_epoch(self) -> None:
        self.begin(self.current_epoch + 1, is_shuffled=self.is_shuffled)

    def get_next_indices(self, n: int) -> tuple[list[int], bool]:
        """The next n rows, and whether the end of an epoch was passed for them."""
        if n > 0 and not self.total_size:
            raise DataError("there are no rows: check the path and its slices")
        found: list[int] = []
        crossed = False
        while len(found) < n:
            if self.position == self.total_size:
                self.next_epoch()
                crossed = True
            stop = min(self.position + n - len(found), self.total_size)
            found += self.permutation.between(self.position, stop).tolist()
            self.position = stop
        return found, crossed

    def get_state(self) -> dict[str, int]:
        return {"epoch_id": self.current_epoch, "position": self.position}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what get_state gave, shuffled or not as now. CursorError for what is none."""
        try:
            position, epoch_id = int(state["position"]), int(state["epoch_id"])
        except (KeyError, TypeError, ValueError) as error:
            raise CursorError(f"this is no state of an IndexManager ({error!r}): give what get_state gave") from error
        self.begin(epoch_id, is_shuffled=self.is_shuffled, position=position)
