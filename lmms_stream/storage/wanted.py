"""What a file in the cache must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a local copy must be. identity: names its content; valid: whether a file has it (reads all of it).

    name: of the copy, in the cache folder. num_bytes: room it takes there, and while it is made.
    by_size: `valid` knows the size alone, so that the store's tag of the object must tell whether a copy is current.
    decode: what makes it of the downloaded bytes (decompression; ValueError when they are damaged).
    remember: of a local dataset's own object too, that it was found valid, so that it is read through once a node.
    """

    name: str
    identity: str
    num_bytes: int
    valid: Callable[[Path], bool]
    by_size: bool = False
    decode: Callable[[bytes], bytes] | None = None
    remember: bool = False
