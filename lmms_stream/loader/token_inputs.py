"""Values of tokens beside their ids, as Gemma 3's kinds of tokens -> named tensors of a batch, along the sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from ..errors import ConfigError


def token_inputs(named: Sequence[Mapping[str, Any]], lengths: Sequence[int], total: int) -> dict[str, torch.Tensor]:
    """int64[1, total] of each name: of samples of these lengths, one after another; 0 where one has none, and behind.

    named: of each sample, an array of its length by name. ConfigError for one of another length.
    """
    names = dict.fromkeys(name for each in named for name in each)
    rows = {name: np.zeros((1, total), np.int64) for name in names}
    starts = accumulate(lengths, initial=0)
    for of_sample, start, length in zip(named, starts, lengths, strict=False):
        for name, values in of_sample.items():
            if np.shape(values) != (length,):
                raise ConfigError(
                    f"a processor gives token_inputs {name!r} of shape {list(np.shape(values))} for a sample of "
                    f"{length} tokens: give one value a token"
                )
            rows[name][0, start : start + length] = values
    return {name: torch.from_numpy(row) for name, row in rows.items()}


def join_token_inputs(named: Sequence[Mapping[str, torch.Tensor]], lengths: Sequence[int]) -> dict[str, torch.Tensor]:
    """Those of batches of so many tokens, one after another; 0 where one has none."""
    names = dict.fromkeys(name for each in named for name in each)
    empty = [torch.zeros(1, length, dtype=torch.int64) for length in lengths]
    return {
        name: torch.cat([each.get(name, zeros) for each, zeros in zip(named, empty, strict=True)], dim=1)
        for name in names
    }
