"""The media of samples -> named tensors of a batch, those of all samples one after another on axis 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import ConfigError
from .media_memory import PackMemory


def media_inputs(media: Sequence[Mapping[str, Any]], memory: PackMemory | None = None) -> dict[str, torch.Tensor]:
    """media: of each sample, its arrays by name; memory: that these may lie in.

    ConfigError where the rows of a name differ in shape or type.
    """
    inputs = {}
    for name, arrays in _by_name(media).items():
        found = memory.joined(name, arrays) if memory is not None else None
        inputs[name] = torch.from_numpy(_joined(name, arrays) if found is None else found)
    if memory is not None:
        memory.give_back()  # what does not lie there is copied by now
    return inputs


def join_inputs(inputs: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors of several batches, one after another on axis 0."""
    return {name: torch.cat(tensors) for name, tensors in _by_name(inputs).items()}


def _by_name(named: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for each in named for name in each)
    return {name: [each[name] for each in named if name in each] for name in names}


def _joined(name: str, arrays: Sequence[Any]) -> NDArray[Any]:
    found = [np.asarray(array) for array in arrays]
    rows = {f"{array.dtype}{['n', *array.shape[1:]]}".replace("'", "") for array in found if array.ndim}
    if len(rows) != 1 or not all(array.ndim for array in found):
        raise ConfigError(
            f"a processor gives media {name!r} as {' and '.join(sorted(rows)) or 'single values'}, which cannot stand "
            "one after another: give arrays that differ in their first axis alone"
        )
    return np.concatenate(found)
