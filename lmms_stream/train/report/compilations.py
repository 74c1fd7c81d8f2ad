"""How many graphs torch compiled since the steps began, and a warning where they are more than packs explain."""

from __future__ import annotations

import logging

MOST_GRAPHS = 16  # a layer's and an attention's, of packs with and without media, some strides: see docs/speed.md
logger = logging.getLogger("lmms_stream")


class Compilations:
    """Counts from when it is made, which is after the proof of the compiled model. tells: this rank warns."""

    def __init__(self, *, tells: bool, most: int = MOST_GRAPHS):
        self._most, self._tells = most, tells
        self._before = _num_graphs()

    def figures(self) -> dict[str, int]:
        """Graphs of this rank, which each cost the time of a compilation."""
        found = _num_graphs() - self._before
        if found > self._most and self._tells:
            self._tells = False
            logger.warning(
                "%d graphs were compiled since the steps began, and %d are expected at most: packs of this run have "
                "something that each is compiled for anew. TORCH_LOGS=recompiles says what; set train.torch_compile to "
                "false, or train.pad_to, so that packs have one length",
                found, self._most,
            )  # fmt: skip
        return {"perf/num_graphs": found}


def _num_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
