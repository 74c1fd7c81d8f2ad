"""Every error this package raises on purpose; each message names the value, the rule and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str], *, otherwise: str = "leave it out", prefix: str = "") -> str:
    """The remedy for an unknown name: the nearest known one, behind the prefix; or `otherwise` where there is none."""
    nearest = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.0)
    return f"did you mean {prefix + nearest[0]!r}?" if nearest else otherwise


class LmmsStreamError(Exception):
    """Base of all errors that a user can act on; the command line prints it in one line."""


class ConfigError(LmmsStreamError):
    """A setting is unknown, of the wrong type, or contradicts another."""


class DataError(LmmsStreamError):
    """Source data cannot be read, or a row does not fit its schema."""


class EmptyRowError(DataError):
    """A row holds an empty text, as ordinary data has some: it is left out and counted."""


class StorageError(LmmsStreamError):
    """A local path or an object store refused or failed a request."""


class ObjectMissingError(StorageError):
    """The named object does not exist in a store that answered."""


class ObjectChangedError(StorageError):
    """A file or an object is not the one any more that was asked for."""

    def __init__(self, where: str):
        super().__init__(where)

    def __str__(self) -> str:
        return f"{self.args[0]} was changed while it was read: start again once nobody writes to it"


class ObjectHiddenError(ObjectMissingError):
    """The named object does not exist, or a store shows it to known users alone, and does not say which."""


class ShardError(LmmsStreamError):
    """A shard or its index is malformed, truncated or corrupt."""


class LengthsError(LmmsStreamError):
    """A lengths index is missing, or disagrees with the samples that it describes."""


class PackingError(LmmsStreamError):
    """Lengths cannot be packed under the given settings."""


class CursorError(LmmsStreamError):
    """A saved position does not belong to the plan at hand."""


class CheckpointError(LmmsStreamError):
    """A checkpoint is missing, incomplete or does not fit the run."""


class WorkerError(LmmsStreamError):
    """A process that makes batches died or gave no answer in time."""


class TrainingError(LmmsStreamError):
    """Training cannot start or go on."""
