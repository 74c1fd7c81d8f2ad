"""A job: it reads all rows of a config and prints its private memory, in bytes, after a tenth of them and at the end.

Its arguments are the config as JSON and the number of rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lmms_stream.datasets import MultiModalIterableDataset


def private_bytes() -> int:
    (line,) = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def main() -> None:
    dataset, num_rows = MultiModalIterableDataset(json.loads(sys.argv[1])), int(sys.argv[2])
    num_read = early = 0
    for batch in dataset:
        num_read += len(batch.sample_ids)
        if not early and num_read >= num_rows // 10:
            early = private_bytes()
    assert num_read == num_rows
    sys.stdout.write(json.dumps([early, private_bytes()]))


if __name__ == "__main__":
    main()
