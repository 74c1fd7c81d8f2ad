"""Every error this package raises on purpose; each message names the value, the rule and the remedy.

Each error is also the built-in exception that fits it best, so that `except ValueError` or `except OSError` in a
user's program catches it. A handler of a built-in exception in this package therefore re-raises LmmsStreamError first
where ours can reach it.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable
from pathlib import Path

_ALIKE = 0.85  # ratio of difflib for names that differ by two typing errors; different words have less
_MOST_LISTED = 30  # names in a message


def did_you_mean(name: object, known: Iterable[str], *, otherwise: str = "leave it out", prefix: str = "") -> str:
    """Return the remedy for an unknown name: the known name that was meant, or else the list of known names.

    The name that was meant differs from `name` by a typing error, or is one of at most three known names that have all
    words of `name` in a row. otherwise: the remedy where nothing is known, or too much to list. prefix: stands before
    the names.

    >>> did_you_mean("lerning_rate", ["learning_rate", "seed"])
    "did you mean 'learning_rate'?"
    >>> did_you_mean("model_type", ["torch_dtype", "attention"])
    'choose one of torch_dtype, attention'
    """
    names = list(known)
    nearest = difflib.get_close_matches(str(name), names, n=1)
    meant = [each for each in nearest if num_unmatched(name, each) <= 1]
    meant = meant or [each for each in names if f"_{name}_" in f"_{each}_"]
    meant = meant or [each for each in nearest if _is_typing_error(name, each)]
    if 1 <= len(meant) <= 3:
        return f"did you mean {' or '.join(repr(prefix + each) for each in meant)}?"
    if not names or len(names) > _MOST_LISTED:
        return otherwise
    return f"choose one of {', '.join(prefix + each for each in names)}"


def nearest_name(pattern: str, names: Iterable[str]) -> str:
    """Return the dotted name, or a part of one, that is most like a pattern.

    >>> nearest_name("*.q_projj.*", ["layers.0.q_proj.weight", "norm.weight"])
    'q_proj'
    """
    known = {part for name in names for part in (name, *name.split("."))}
    return difflib.get_close_matches(pattern.strip("*."), sorted(known), n=1, cutoff=0)[0]


def _is_typing_error(name: object, known: str) -> bool:
    """Return whether at most one letter is wrong, missing, doubled or swapped, or two letters of a long name."""
    wrong, num_letters = num_unmatched(name, known), len(known) + len(str(name))
    return wrong <= 2 or (wrong <= 4 and 1 - wrong / num_letters >= _ALIKE)


def num_unmatched(name: object, known: str) -> int:
    """Return how many letters of both names have no partner in the other."""
    num_letters = len(known) + len(str(name))
    return round((1 - difflib.SequenceMatcher(None, known, str(name)).ratio()) * num_letters)


def if_lfs_pointer(data: bytes) -> str:
    """Explanation for a file with these first bytes, if a pointer of Git LFS; "" for other files."""
    if not data.startswith(b"version https://git-lfs.github.com/spec/"):
        return ""
    return "is a Git LFS pointer, which stands for data that was not downloaded: run git lfs pull in its repository"


def if_folder_of_lfs_pointers(folder: str, pattern: str = "*") -> str:
    """Name and explanation for the first Git LFS pointer among the matching files of a folder; or ""."""
    for path in sorted(Path(folder).glob(pattern)):
        with path.open("rb") as file:
            if problem := if_lfs_pointer(file.read(64)):
                return f"{path} {problem}"
    return ""


class LmmsStreamError(Exception):
    """Base of all errors that a user can act on, without secrets of URLs; the command line prints one line."""

    def __init__(self, *args: object):
        super().__init__(*(without_secrets(each) if isinstance(each, str) else each for each in args))


# Parameters of a signed URL's query (S3, Google, Azure, CloudFront, Alibaba, tokens), and names and passwords of URLs.
_SECRET = re.compile(
    r"""((?:[?&;]|\\u0026|&amp;|%(?:25)*(?:3f|26|3b))(?:x-(?:amz|goog|oss|obs|cos|ms)-[\w-]+|[\w-]*(?:sig|signature|token|secret|passw(?:or)?d|
    credential|policy|auth(?:orization)?|jwt|sas|hdnea|hdnts)|awsaccesskeyid|googleaccessid|ossaccesskeyid|key-pair-id|api_?key|key)
    (?:=|%(?P<twice>(?:25)*)3d))(?:(?!\\u0026)(?(twice)(?!%(?P=twice)26))[^&\s'"<>])+""",
    re.IGNORECASE | re.VERBOSE,
)
_USER = re.compile(r"""(\bhttps?://)[^/\s@'"]+@|(\b[a-z][\w+.-]*://)[^/\s:@'"]+:[^/\s@'"]+@""", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """Return a text with … in place of the signatures, tokens and passwords of its URLs.

    >>> without_secrets("https://a:b@host/x?X-Amz-Date=1&part=2&X-Amz-Signature=3f")
    'https://…@host/x?X-Amz-Date=…&part=2&X-Amz-Signature=…'
    """
    if "://" not in text and "%" not in text:
        return text
    return _USER.sub(lambda found: f"{found[1] or found[2]}…@", _SECRET.sub(r"\1…", text))


class _WithoutSecrets(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if (shown := without_secrets(text)) != text:
            record.msg, record.args = shown, ()
        return True


logging.getLogger("lmms_stream").addFilter(_WithoutSecrets())


class ConfigError(LmmsStreamError, ValueError):
    """A setting is unknown, of the wrong type, or contradicts another."""


class DataError(LmmsStreamError, ValueError):
    """Source data cannot be read, or a row does not fit its schema."""


class EmptyRowError(DataError):
    """A row holds an empty text, as ordinary data has some: it is left out and counted."""


class StorageError(LmmsStreamError, OSError):
    """A local path or an object store refused or failed a request."""


class ObjectMissingError(StorageError, FileNotFoundError):
    """The named object does not exist in a store that answered."""


class TargetExistsError(StorageError, FileExistsError):
    """The target of a dataset already exists."""


class ObjectChangedError(StorageError):
    """A file or an object has changed since the request."""

    def __init__(self, where: str):
        super().__init__(where)

    def __str__(self) -> str:
        return f"{self.args[0]} was changed during reading: start again after all writes to it"


class ObjectHiddenError(ObjectMissingError):
    """The named object does not exist, or is visible only to known users; the store does not distinguish."""


class ShardError(LmmsStreamError, ValueError):
    """A shard or its index is malformed, truncated or corrupt."""


class LengthsError(LmmsStreamError, ValueError):
    """A lengths index is missing or disagrees with its samples."""


class PackingError(LmmsStreamError, ValueError):
    """Lengths cannot be packed under the given settings."""


class CursorError(LmmsStreamError, ValueError):
    """A saved position does not belong to the plan at hand."""


class CheckpointError(LmmsStreamError, RuntimeError):
    """A checkpoint is missing, incomplete or does not fit the run."""


class WorkerError(LmmsStreamError, RuntimeError):
    """A process that makes batches died or gave no answer in time."""


class TrainingError(LmmsStreamError, RuntimeError):
    """Training cannot start or go on."""
