"""A job: a run of which rank 1 fails, in its third step, as nobody foresaw. Arguments: as of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lmms_stream.loader.collate import collate
from lmms_stream.types import Batch
from torch.distributed.elastic.multiprocessing.errors import record

from tests.train.runs import trainer_of


def fail_on_rank_1(*args: Any, step: int, **options: Any) -> Batch:
    """What collate gives, until it fails."""
    if dist.get_rank() == 1 and step == 2:
        raise ZeroDivisionError("rank 1 fails here")
    return collate(*args, step=step, **options)


@record
def main() -> None:
    trainer_of(Path(sys.argv[1]), *sys.argv[2:], data_collator=fail_on_rank_1).train()


if __name__ == "__main__":
    main()
