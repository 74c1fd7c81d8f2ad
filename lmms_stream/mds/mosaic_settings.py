"""The keywords of a StreamingDataset, checked."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from ..plan.mosaic_order import BATCHING_METHODS, PARTITIONS
from ..plan.mosaic_shuffles import ALGORITHMS

BLOCKS = "blocks"  # our order, as a shuffle_algo
_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def check_settings(dataset: Any) -> None:
    """ConfigError for a keyword whose value is none of its values, or does not go with another's."""
    choices = {
        "sampling_method": ("balanced", "fixed"),
        "batching_method": BATCHING_METHODS,
        "shuffle_algo": (*ALGORITHMS, BLOCKS),
        "partition_algo": PARTITIONS,
    }
    for name, valid in choices.items():
        if getattr(dataset, name) not in valid:
            raise ConfigError(f"{name} must be one of {', '.join(valid)}, got {getattr(dataset, name)!r}")
    least = {"sampling_granularity": 1, "shuffle_seed": 0, "batch_size": 1, "predownload": 1, "num_canonical_nodes": 0}
    for name, number in least.items():
        value = getattr(dataset, name)
        if value is not None and value < number:
            raise ConfigError(f"{name} must be {f'at least {number}' if number else '0 or more'}, got {value}")
    if dataset.allow_unsafe_types:
        raise ConfigError(
            "allow_unsafe_types is refused: to unpickle data is to run what its writer put there; write such "
            "columns again with another encoding"
        )
    if dataset.shuffle_algo == BLOCKS and (dataset.batching_method, dataset.sampling_method) != ("random", "balanced"):
        raise ConfigError(
            f"shuffle_algo {BLOCKS!r} goes with batching_method 'random' and sampling_method 'balanced', got "
            f"{dataset.batching_method!r} and {dataset.sampling_method!r}: choose another shuffle_algo"
        )


def whole_number(epoch_size: int | str | None) -> int | None:
    """An epoch_size in words as a number; None where it is left to the streams, as 0 is."""
    text = str(epoch_size or 0).strip().lower()
    unit = _UNITS.get(text[-1:], 1)
    try:
        return int(float(text[:-1]) * unit if unit > 1 else int(text)) or None
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"epoch_size must be a number of samples, such as 100000 or '100k', got {epoch_size!r}"
        ) from error
