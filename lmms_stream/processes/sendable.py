"""What can be sent to another interpreter. value -> what stands in the way."""

from __future__ import annotations

import pickle
from io import BytesIO
from types import FunctionType
from typing import Any


def obstacle(given: Any) -> str | None:
    """Why another interpreter cannot be sent this: it cannot be pickled, or is of the program's main module."""
    pickler = _MainFinder(BytesIO())
    try:
        pickler.dump(given)
    except Exception as error:  # noqa: BLE001 - whatever pickling raises, the value cannot be sent
        return f"it cannot be pickled ({error})"
    return f"{pickler.found} is defined in the program's main module" if pickler.found else None


class _MainFinder(pickle.Pickler):
    """Notes a class or function of the main module in what it pickles."""

    found: str | None = None

    def reducer_override(self, given: Any) -> Any:
        if isinstance(given, type | FunctionType) and given.__module__ == "__main__":
            self.found = given.__qualname__
        return NotImplemented
