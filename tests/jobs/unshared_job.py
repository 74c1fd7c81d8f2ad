"""A job: a run whose output_dir is another folder for each rank. Its arguments are a config and a folder.

Beside the folders `<rank>` of that one comes `<rank>.txt` with the error of each rank.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lmms_stream.errors import CheckpointError

from tests.train.runs import trainer_of


def main() -> None:
    rank, folder = os.environ["RANK"], Path(sys.argv[2])
    (folder / rank).mkdir()
    os.chdir(folder / rank)
    try:
        trainer_of(Path(sys.argv[1]), "train.output_dir=out").train()
    except CheckpointError as error:
        (folder / f"{rank}.txt").write_text(str(error))


if __name__ == "__main__":
    main()
