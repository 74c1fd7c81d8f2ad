"""Sizes in bytes as people write and read them: "500mb", "1.5 GiB"."""

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


def shown_bytes(num_bytes: float) -> str:
    """A number of bytes for people, in units of 1024.

    >>> shown_bytes(1536), shown_bytes(12)
    ('1.5 KiB', '12 bytes')
    """
    if num_bytes < 1024:
        return f"{num_bytes:,.0f} bytes"
    steps = min(4, (int(num_bytes).bit_length() - 1) // 10)
    return f"{num_bytes / 1024**steps:,.1f} {('KiB', 'MiB', 'GiB', 'TiB')[steps - 1]}"
