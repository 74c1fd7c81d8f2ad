"""`torchrun … -m lmms_stream.train CONFIG.yaml key.sub=value …`; without torchrun, a single process."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import LmmsStreamError
from ..processes.family import end_process
from .launch import lost_ranks_named, prepare, without_collections

USAGE = """usage: torchrun … -m lmms_stream.train RUN.yaml [SETTING=VALUE ...]

Train what a YAML file says (dataset, model, train), on the ranks that torchrun
starts; without torchrun on one. The same command goes on where a run was ended.

  RUN.yaml       run what this file says
  SETTING=VALUE  change a setting of the file, as train.max_steps=100

example:
  torchrun --nproc-per-node 2 -m lmms_stream.train run.yaml train.max_steps=100

more: docs/training.md, docs/settings.md
"""


def main(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & {*arguments}:
        sys.stdout.write(USAGE)
        return 0 if arguments else 2
    try:
        return run(Path(arguments[0]), arguments[1:])
    except LmmsStreamError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(
            "interrupted, nothing was saved: the same command resumes from the latest checkpoint, if any\n"
        )
        return 130


def run(path: Path, overrides: Sequence[str]) -> int:
    """Train by the config; return the exit status."""
    try:
        return _train(path, overrides)
    finally:
        gc.unfreeze()  # libraries clean up if the process ends in the usual way


def _train(path: Path, overrides: Sequence[str]) -> int:
    logging.basicConfig(format="%(message)s")
    logging.getLogger("lmms_stream").setLevel(logging.INFO)
    prepared = prepare(path, overrides)
    with without_collections():
        from .loop import StoppedError
        from .run.distributed import STOPPED_STATUS, end_distributed
    try:
        with lost_ranks_named(prepared):
            with without_collections():
                trainer = prepared.trainer()
            trainer.around_build = without_collections
            trainer.train()
    except StoppedError as stopped:
        if prepared.rank == 0:
            sys.stderr.write(f"{stopped}\n")
        return STOPPED_STATUS
    finally:
        end_distributed()
    return 0


def start() -> int:
    """Run this process's command, alone or in a rank of torchrun; return the exit status."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:  # torchrun did not start this process
        faulthandler.enable()
        return main(sys.argv[1:])
    from torch.distributed.elastic.multiprocessing.errors import record  # a rank's traceback reaches torchrun's report

    return record(main)(sys.argv[1:]) or 0


if __name__ == "__main__":
    end_process(start())
