"""The schema of a config class is made once in a process of tests: pydantic makes it in 25 ms for each config read."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

import pydantic

_NAMES = ("core_schema", "validator", "serializer")


def keep_schemas() -> None:
    """From now on a dataclass keeps what its first TypeAdapter made."""
    init: Any = pydantic.TypeAdapter.__init__

    def kept(self: pydantic.TypeAdapter[Any], type: Any, **options: Any) -> None:
        init(self, type, **options)
        if is_dataclass(type) and not options and "__pydantic_validator__" not in vars(type):
            for name in _NAMES:
                setattr(type, f"__pydantic_{name}__", getattr(self, name))

    pydantic.TypeAdapter.__init__ = kept  # type: ignore[method-assign]
