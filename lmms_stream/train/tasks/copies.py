"""Batches of micro-batches -> the same on the device, the next one copied while the one before is computed with.

On a GPU copies run on a stream of their own, from page-locked memory; this was not tried on one here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

import torch

from ...types import Batch


def on_device(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches on the device; on a GPU each is taken, and its copy begun, before the one before it is given."""
    if device.type != "cuda":
        yield from (batch.to(device) for batch in batches)
        return
    stream, waiting = _side_stream(device), None
    for batch in batches:
        pinned = batch if batch.input_ids.is_pinned() else batch.pin_memory()
        with torch.cuda.stream(stream):
            copied = pinned.to(device), stream.record_event()
        if waiting is not None:
            yield _ready(*waiting)
        waiting = copied
    if waiting is not None:
        yield _ready(*waiting)


def _ready(batch: Batch, event: torch.cuda.Event) -> Batch:
    """The batch, once what is computed from here on waits for its copy; its memory is kept until that is computed."""
    current = torch.cuda.current_stream()
    current.wait_event(event)
    batch.record_stream(current)
    return batch


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
