"""FLOPs of towers that read mel frames of sounds, as Whisper's encoder does. model, clips -> FLOPs.

Convolutions halve the frames, blocks attend within stretches of what is left, and pairs of positions may be joined at
the end. A clip counts with its own frames, in chunks where the tower reads it so; Qwen2-Audio's with those that every
clip is padded to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .products import Products, matrices, num_blocks, stage_of_block

_CONVOLUTIONS = {"conv1": 0, "conv2": 1, "conv2d1": 1, "conv2d2": 2, "conv2d3": 3}  # halvings when they have been run


@dataclass(frozen=True, kw_only=True, slots=True)
class SoundFlops:
    """per_position: FLOPs of a position after 0, 1, … halvings; per_pooled: of a joined pair of the last.

    chunk: frames that are convolved together (0: a clip). window: positions that attend to one another (0: those of a
    chunk). padded: frames that every clip has (0: its own).
    """

    per_position: tuple[float, ...]
    per_pooled: float
    per_pair: float
    chunk: int
    window: int
    padded: int

    def of(self, inputs: Mapping[str, torch.Tensor]) -> float:
        """See MediaFlops."""
        if self.padded:
            found = inputs.get("input_features")
            return 0.0 if found is None else self.of_clips(np.full(len(found), self.padded))
        lengths = inputs.get("audio_lengths")
        return 0.0 if lengths is None else self.of_clips(lengths.numpy())

    def of_clips(self, frames: NDArray[np.int64]) -> float:
        """Clips of so many mel frames."""
        return sum(self._of_clip(int(each)) for each in frames)

    def _of_clip(self, frames: int) -> float:
        chunk = self.chunk or frames
        levels = np.array([chunk] * (frames // chunk) + [frames % chunk] * (frames % chunk > 0))
        total = 0.0
        for halvings, flops in enumerate(self.per_position):
            levels = levels if halvings == 0 else (levels - 1) // 2 + 1
            total += flops * float(levels.sum())
        positions = int(levels.sum())
        if self.window:
            levels = np.array([self.window] * (positions // self.window) + [positions % self.window])
        num_pairs = float((levels.astype(np.float64) ** 2).sum())
        return total + self.per_pair * num_pairs + self.per_pooled * (positions // 2)


def sound_flops(tower: torch.nn.Module, config: Any, *, behind: Sequence[torch.nn.Module]) -> SoundFlops | None:
    """config: of the tower; None for one that has no such convolutions and blocks. behind: between tower and text."""
    found = [name for name in _CONVOLUTIONS if hasattr(tower, name)]
    width, depth = getattr(config, "d_model", None), num_blocks(tower)
    bins = getattr(config, "num_mel_bins", None)
    if len(found) < 2 or not (width and depth and bins):
        return None
    last = len(found) + depth + 1
    halvings = max(_CONVOLUTIONS[name] for name in found)
    is_pooled = hasattr(tower, "avg_pooler")

    def stage(name: str) -> int:
        block, part = stage_of_block(name), name.split(".")[0]
        if block is not None:
            return len(found) + 1 + block
        return found.index(part) if part in found else len(found) if part == "conv_out" else last

    stages = [(stage(name), each) for name, each in tower.named_parameters()]
    products = Products([*stages, *((last, each) for module in behind for each in module.parameters())])
    per_position, per_pooled = [0.0] * (halvings + 1), 0.0
    for name, parameter in matrices([tower, *behind]):
        number, _, rest = name.partition(".")
        part = rest.split(".")[0] if number == "0" else ""
        flops = products.of(stage(rest) if part else last, parameter)
        if part in found:
            rows = _halved(bins, _CONVOLUTIONS[part]) if parameter.ndim == 4 else 1
            per_position[_CONVOLUTIONS[part]] += flops * rows
        elif is_pooled and part in ("", "proj"):
            per_pooled += flops
        else:
            per_position[-1] += flops
    per_pair = sum(products.of_pair(len(found) + 1 + number, width) for number in range(depth))
    n_window = int(getattr(config, "n_window", 0) or 0)
    shared: dict[str, Any] = {"per_position": tuple(per_position), "per_pooled": per_pooled, "per_pair": per_pair}
    if not n_window:
        return SoundFlops(**shared, chunk=0, window=0, padded=2 * config.max_source_positions)
    chunks = int(getattr(config, "n_window_infer", 0) or 0) // (2 * n_window)
    return SoundFlops(**shared, chunk=2 * n_window, window=chunks * _halved(2 * n_window, halvings), padded=0)


def _halved(count: int, times: int) -> int:
    """What convolutions with stride 2 leave of so many."""
    for _ in range(times):
        count = (count - 1) // 2 + 1
    return count
