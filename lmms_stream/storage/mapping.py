"""Files in memory without a descriptor: a process may map more of them than it may have open. path -> memoryview.

Python's mmap keeps a copy of the descriptor for as long as the mapping exists, and many machines allow 1024.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


def map_file(path: Path) -> memoryview:
    """Map a whole file to read it. The mapping ends with the last array or view of it."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            return memoryview(b"")
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    data = (ctypes.c_ubyte * size).from_address(address)
    end = weakref.finalize(data, _libc.munmap, address, size)
    end.atexit = False  # arrays of it may outlive that
    return memoryview(data).cast("B").toreadonly()
