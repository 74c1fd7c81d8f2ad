"""Arrays and JSON values -> short digests; drawn numbers that no release of NumPy changes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

STORED = Path(__file__).with_name("stored")
Digests = Mapping[str, str]  # name of a case -> digest


def drawn(seed: int, count: int) -> NDArray[np.uint64]:
    """Return `count` pseudorandom numbers: SplitMix64 (Steele, Lea and Flood 2014) of a counter."""
    with np.errstate(over="ignore"):
        z = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed * 1_000_003)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(z ^ (z >> np.uint64(31)), np.uint64)


def array_digest(arrays: Iterable[Any]) -> str:
    """Return 64 bits of SHA-256 of arrays of integers, with their shapes; None counts as an array of its own."""
    content = hashlib.sha256()
    for array in arrays:
        if array is None:
            content.update(b"none")
            continue
        values = np.asarray(array)
        content.update(str(values.shape).encode() + np.ascontiguousarray(values.astype("<i8")).tobytes())
    return content.hexdigest()[:16]


def byte_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_lines(value, depth=2) + "\n", encoding="utf-8")


def _lines(value: Any, *, depth: int) -> str:
    """Return JSON with the keys of the outer `depth` mappings on lines of their own."""
    if not depth or not isinstance(value, dict) or not value:
        return json.dumps(value, ensure_ascii=False)
    indent = " " * (3 - depth)
    lines = [f"{indent}{json.dumps(key)}: {_lines(inner, depth=depth - 1)}" for key, inner in value.items()]
    return "{\n" + ",\n".join(lines) + "\n" + indent[1:] + "}"


def differing(stored: Mapping[str, Any], computed: Mapping[str, Any]) -> list[str]:
    """Return the names of the cases whose values differ, or that only one side has."""
    names = sorted({*stored, *computed})
    return [name for name in names if stored.get(name) != computed.get(name)]


def file_sums(root: Path) -> dict[str, str]:
    """Return a digest of each file below a folder but sums.json, by its path."""
    files = sorted(path for path in root.rglob("*") if path.is_file() and path != root / "sums.json")
    return {path.relative_to(root).as_posix(): byte_digest(path.read_bytes()) for path in files}


def changed_values(stored: Any, computed: Any, *, path: str = "") -> list[str]:
    """Return the paths of stored values that are different now; further keys of today's mappings may be new."""
    if isinstance(stored, dict) and isinstance(computed, dict):
        inner = ((f"{path}.{key}", value, computed.get(key, "missing")) for key, value in stored.items())
        return [changed for at, value, now in inner for changed in changed_values(value, now, path=at)]
    if isinstance(stored, list) and isinstance(computed, list) and len(stored) == len(computed):
        pairs = enumerate(zip(stored, computed, strict=True))
        return [changed for at, (a, b) in pairs for changed in changed_values(a, b, path=f"{path}[{at}]")]
    return [] if stored == computed else [f"{path}: {stored!r} is {computed!r} now"]
