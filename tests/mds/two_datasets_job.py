"""A rank of a job with a dataset to train on and one to evaluate, each read by two forked workers.

Arguments: a folder with "train" and "eval", `local` of each ("JOB" in it is the job's name), the folder of answers, and
"wait" to stand still after the first batch. Writes the numbers that the rank read to `<JOB>-<RANK>.json`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from lmms_stream import StreamingDataLoader, StreamingDataset


def _numbers(samples: list[dict[str, Any]]) -> list[int]:
    return [int(sample["number"]) for sample in samples]


def main() -> None:
    data, train, evaluation, answers, *wait = sys.argv[1:]
    answer = Path(answers, f"{os.environ['JOB']}-{os.environ['RANK']}.json")
    datasets = [
        StreamingDataset(
            remote=f"{data}/{name}", local=local.replace("JOB", os.environ["JOB"]), batch_size=4, shuffle=True
        )
        for name, local in (("train", train), ("eval", evaluation))
    ]
    read: list[list[int]] = []
    for dataset in datasets:
        read.append([])
        loader = StreamingDataLoader(
            dataset, batch_size=4, num_workers=2, collate_fn=_numbers, multiprocessing_context="fork", timeout=60
        )
        for batch in loader:
            read[-1] += batch
            if wait:
                answer.touch()
                time.sleep(600)
    answer.write_text(json.dumps(read))


if __name__ == "__main__":
    main()
