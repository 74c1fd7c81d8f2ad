"""Upload the files of a folder: `python -m tests.cluster.upload FOLDER URL`, started within a namespace."""

from __future__ import annotations

import sys
from pathlib import Path

from lmms_stream.storage.storage import open_storage


def main(folder: Path, url: str) -> None:
    storage = open_storage(url)
    for path in folder.rglob("*"):
        if path.is_file():
            storage.upload(path, str(path.relative_to(folder)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
