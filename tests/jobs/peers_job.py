"""A job: a run whose ranks are nodes with caches of their own. Its arguments are a config, a folder and overrides.

Beside the folders `<rank>` of that one comes `<rank>.json` with what the loader of each rank has fetched.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.train.runs import trainer_of


def main() -> None:
    rank, folder = os.environ["RANK"], Path(sys.argv[2])
    (folder / rank).mkdir(parents=True)
    os.chdir(folder / rank)
    trainer = trainer_of(Path(sys.argv[1]), *sys.argv[3:])
    trainer.train()
    (folder / f"{rank}.json").write_text(json.dumps(trainer.loader.fetched._asdict()))


if __name__ == "__main__":
    main()
