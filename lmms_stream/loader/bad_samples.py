"""What is done with samples that cannot be processed: which errors are of one sample, and what stands in its place."""

from __future__ import annotations

import errno
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch

from ..checks import check_fields
from ..errors import ConfigError, DataError, LengthsError, LmmsStreamError, ShardError, StorageError
from ..mds.core import PackedDataset
from ..processors.base import IGNORED_LABEL
from ..types import Processed
from .collate import collate
from .pack_collator import PackCollator

OnBadSample = Literal["error", "quarantine"]
MAX_REASON = 500  # characters of an error that a list keeps
_NEVER = (MemoryError, ImportError, StorageError, ShardError, ConfigError, torch.OutOfMemoryError)


@dataclass(frozen=True, kw_only=True, slots=True)
class BadSamples:
    """How a loader treats bad samples.

    on_bad_sample: "error" ends the run with the sample's name; "quarantine" puts padding without loss in its place.
    sample_timeout_s: a sample that takes longer to process is an error; None: it may take as long as it likes. folder:
    where each worker appends what it quarantines (default: nowhere). Raises ConfigError.
    """

    on_bad_sample: OnBadSample = "error"
    sample_timeout_s: float | None = None
    folder: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, paths=("folder",))
        if self.on_bad_sample not in get_args(OnBadSample):
            raise ConfigError(f"on_bad_sample must be {' or '.join(get_args(OnBadSample))}, got {self.on_bad_sample!r}")
        timeout_s = self.sample_timeout_s
        if timeout_s is not None and not 0 < timeout_s < math.inf:
            raise ConfigError(f"sample_timeout_s must be a number of seconds above 0, got {timeout_s}")


def is_of_sample(error: Exception) -> bool:
    """Whether an error is of one sample: not of a store, a shard, the machine or the settings, by itself or its causes.

    Image libraries raise OSError for damaged bytes, too; those of the system have a number.
    """
    if isinstance(error, LmmsStreamError) and not isinstance(error, DataError | LengthsError):
        return False
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, _NEVER) or _is_of_system(seen):
            return False
        seen = seen.__cause__ or seen.__context__
    return True


def _is_of_system(error: BaseException) -> bool:
    of_decoder = type(error).__module__.partition(".")[0] == "av"  # its errors of damaged bytes have numbers, too
    return isinstance(error, OSError) and error.errno in errno.errorcode and not of_decoder


def reason_of(error: Exception) -> str:
    """What a list says of an error, in one line."""
    said = str(error) if isinstance(error, LmmsStreamError) else f"{type(error).__name__}: {error}"
    return " ".join(said.split())[:MAX_REASON]


def padding_of(length: int) -> Processed:
    """What stands in the place of a segment of so many tokens: padding without loss."""
    return {"input_ids": np.zeros(length, np.int64), "labels": np.full(length, IGNORED_LABEL, np.int64)}


def check_padded(datasets: Mapping[str, PackedDataset], collator: object) -> None:
    """ConfigError where batches are made of more than tokens and media, so that padding is not all that they need."""
    objectives = {name: getattr(each.processor, "objective", None) for name, each in datasets.items()}
    found = [f"{name} is for {each}" for name, each in objectives.items() if each is not None]
    if collator is not collate and not isinstance(collator, PackCollator):
        found.append("the collator is another")
    if found:
        raise ConfigError(
            f"samples can be left out of batches of language models alone, and {', '.join(found)}: set on_bad_sample "
            "to error and leave out drop, or convert the dataset without them"
        )
