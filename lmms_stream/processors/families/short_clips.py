"""Clips of sound that are shorter than a block, read by Qwen3-Omni's convolutions as if each lay alone.

transformers pads the blocks of all clips of a call to the longest, and the second convolution reads what the first
makes of the padding, which is its bias and no zero. So a clip shorter than a block would be read otherwise beside a
longer one than alone. Here what lies behind such a clip is set to zero after each convolution, as the padding of the
next one is.
"""

from __future__ import annotations

from functools import partial
from typing import Any


class ShortClips:
    """Hooks of one tower. block: mel frames that are read together; convolutions: by name, all but the last."""

    def __init__(self, tower: Any, *, block: int, convolutions: tuple[str, ...]):
        self._block = block
        self._lengths: list[int] = []  # of each block of a call, as it would be padded if its clip lay alone
        self._begun = [0] * len(convolutions)
        tower.register_forward_pre_hook(self._begin, with_kwargs=True)
        for depth, name in enumerate(convolutions):
            getattr(tower, name).register_forward_hook(partial(self._cut, depth))

    def _begin(self, tower: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        frames = (named["feature_lens"] if "feature_lens" in named else inputs[1]).tolist()
        self._lengths = [min(clip, self._block) for clip in frames for _ in range(-(-clip // self._block))]
        self._begun = [0] * len(self._begun)

    def _cut(self, depth: int, module: Any, inputs: Any, made: Any) -> Any:
        """made: float[blocks, channels, bins, frames], of some of the blocks."""
        begun = self._begun[depth]
        self._begun[depth] += len(made)
        lengths = [halved(length, depth + 1) for length in self._lengths[begun : self._begun[depth]]]
        width = made.shape[-1]
        if min(lengths) >= width:
            return None
        is_behind = made.new_ones(width).cumsum(0)[None] > made.new_tensor(lengths)[:, None]
        return made.masked_fill(is_behind[:, None, None], 0)


def halved(length: int, times: int) -> int:
    """What so many convolutions with stride 2 leave of frames.

    >>> halved(31, 1), halved(31, 2), halved(100, 3)
    (16, 8, 13)
    """
    for _ in range(times):
        length = (length - 1) // 2 + 1
    return length
