"""Names in rows that nothing reads: in how many rows each is, and in which first.

Rows say a name while a unit is encoded; units are taken in the order of the sources, so the counts are the same for any
number of processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEY_OF_MESSAGES = "messages[]."  # before the name of a key of messages; other names are columns
UnreadRows = Mapping[str, NDArray[np.int64]]  # name -> numbers of the rows in the unit that hold something by this name


@dataclass(frozen=True, kw_only=True, slots=True)
class Unread:
    """first: the first row that holds something by a name, as "source:row". num_rows: rows that do."""

    first: str
    num_rows: int


UnreadNames = Mapping[str, Unread]


def unread_of(rows: UnreadRows, *, source: str, first_row: int) -> dict[str, Unread]:
    """What a unit says. first_row: rows of the source before the unit."""
    return {
        name: Unread(first=f"{source}:{first_row + int(numbers[0]) + 1}", num_rows=len(numbers))
        for name, numbers in rows.items()
        if len(numbers)
    }


def joined(each: Iterable[UnreadNames]) -> dict[str, Unread]:
    """All together, in the order of the sources."""
    found: dict[str, Unread] = {}
    for names in each:
        for name, unread in names.items():
            before = found.get(name)
            num_rows = unread.num_rows + (before.num_rows if before else 0)
            found[name] = Unread(first=before.first if before else unread.first, num_rows=num_rows)
    return found


def described(names: UnreadNames) -> dict[str, Any]:
    """What a dataset.json says; nothing where everything is read."""
    return {"unread": {name: asdict(unread) for name, unread in names.items()}} if names else {}


def of_dataset(description: Mapping[str, Any]) -> dict[str, Unread]:
    """What a dataset.json says; earlier releases did not write it."""
    return {name: Unread(**unread) for name, unread in description.get("unread", {}).items()}
