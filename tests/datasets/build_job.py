"""Builds the dataset of a config (JSON, the first argument), and writes what it is to the file of its rank."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

from lmms_stream.datasets import MultiModalDataset


def main() -> None:
    logging.basicConfig(format="%(message)s")
    dataset = MultiModalDataset(json.loads(sys.argv[1])).build()
    made = {"url": dataset.core.url, "packs": len(dataset)}
    Path(sys.argv[2], f"{os.environ['RANK']}.json").write_text(json.dumps(made))


if __name__ == "__main__":
    main()
