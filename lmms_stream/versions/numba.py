"""The decorator of loops that numba compiles, and the files that keep their machine code."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit
from numba.core.caching import IndexDataCacheFile

Loop = TypeVar("Loop", bound=Callable[..., Any])


class CacheFile(IndexDataCacheFile):
    """Files of a loop's machine code, each named by the types, the machine and the source that it was compiled for.

    numba names them by numbers. Processes that compile a loop at the same time for different types choose the same
    number, and the index of one then names the code of the other: of 480 processes, 5 called code for other types. It
    also writes the index before the code, and takes the numbers of an older source again.
    """

    def save(self, key: Any, data: Any) -> None:
        """Write the code, then the index. An index that another process writes meanwhile costs a compilation."""
        digest = hashlib.blake2b(repr((self._source_stamp, key)).encode(), digest_size=16).hexdigest()
        name = self._data_name(digest)
        self._save_data(name, data)
        self._save_index({**self._load_index(), key: name})

    def _data_name(self, digest: str) -> str:
        return f"{self._index_name.removesuffix('.nbi')}.{digest}.nbc"


def compiled(loop: Loop | None = None, **options: Any) -> Any:
    """Compile a loop at its first call without the interpreter's lock, and keep its code. options: of numba's njit."""
    if loop is None:
        return lambda loop: compiled(loop, **options)
    made = njit(cache=True, nogil=True, **options)(loop)
    if (cache := getattr(made, "_cache", None)) is not None:  # not with NUMBA_DISABLE_JIT
        cache._cache_file.__class__ = CacheFile
    return made
