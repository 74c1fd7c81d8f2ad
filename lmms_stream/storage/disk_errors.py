"""What a disk refuses, as an error that names the path and the remedy."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import LmmsStreamError, StorageError

FREE_SOME = "free some, or name another folder (as local, as --work, as the target), or set cache_limit"


def disk_error(where: str, error: OSError, *, room: str = FREE_SOME) -> StorageError:
    """What the disk refused, with the remedy; room: that of a disk that is full."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StorageError(f"{where}: no room on the disk of this node ({error.strerror}): {room}")
    file = f": {error.filename}" if error.filename else ""
    return StorageError(f"{where}: {error.strerror}{file}: check the path and its rights")


@contextmanager
def disk_errors(where: str, *, room: str = FREE_SOME) -> Iterator[None]:
    """What the disk refuses inside is a StorageError, see disk_error."""
    try:
        yield
    except LmmsStreamError:
        raise
    except OSError as error:
        raise disk_error(where, error, room=room) from error
