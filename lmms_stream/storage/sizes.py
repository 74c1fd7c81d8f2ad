"""Sizes in bytes as people write them: "500mb", "1.5gb"."""

from __future__ import annotations

from ..errors import ConfigError

_UNITS = {"b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40}


def parse_bytes(text: int | str, *, name: str = "cache_limit") -> int:
    """A number of bytes: an int, or text as "500mb" or "1.5gb" (of 1024, as MosaicML Streaming counts).

    name: of what is given, for the ConfigError when it is no such number.

    >>> parse_bytes("1.5kb")
    1536
    """
    number = str(text).strip().lower()
    unit = next((unit for unit in ("kb", "mb", "gb", "tb", "b") if number.endswith(unit)), "")
    try:
        size = int(float(number.removesuffix(unit)) * _UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise ConfigError(f"{name} {text!r} is not a number of bytes: write it as 500mb or 1.5gb")
    return size
