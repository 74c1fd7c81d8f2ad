"""`torchrun … -m lmms_stream.tools.profile OUT.json STEPS WARMUP_STEPS SECONDS CONFIG.yaml key.sub=value …`.

The process, or each rank, that `lmms-stream profile` starts; the rates are written as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from ...errors import LmmsStreamError
from ...processes.family import end_process
from ...train.launch import lost_ranks_named, prepare


def main(arguments: Sequence[str]) -> int:
    out, steps, warmup_steps, seconds, config, *overrides = arguments
    logging.basicConfig(format="%(message)s")
    logging.getLogger("lmms_stream").setLevel(logging.INFO)
    limits = {"steps": int(steps), "warmup_steps": int(warmup_steps), "seconds": float(seconds)}
    try:
        _measure(Path(out), limits, Path(config), overrides)
    except LmmsStreamError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def _measure(out: Path, limits: dict[str, float], config: Path, overrides: Sequence[str]) -> None:
    prepared = prepare(config, overrides)
    from ...train.run.distributed import end_distributed
    from .measure import MeasureConfig, measure

    def tell(line: str) -> None:
        if prepared.rank == 0:
            sys.stderr.write(f"{line}\n")

    try:
        with lost_ranks_named(prepared):
            rates = measure(prepared.trainer(), MeasureConfig(**limits), tell)  # type: ignore[arg-type]
            if prepared.rank == 0:
                out.write_text(json.dumps(dataclasses.asdict(rates)))
    finally:
        end_distributed()


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
