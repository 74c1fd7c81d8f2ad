"""A job: a run whose ranks read their own metrics over HTTP after the last step, into metrics-RANK.txt beside its log.

Arguments: as of a run.
"""

from __future__ import annotations

import os
import socket
import sys
import urllib.request
from pathlib import Path
from typing import Any

from lmms_stream.train.report.exporter import PORT
from transformers import TrainerCallback

from tests.train.runs import trainer_of

READ_S = 20


class ReadsMetrics(TrainerCallback):
    def on_train_end(self, args: Any, *_: Any, **__: Any) -> None:
        rank = int(os.environ["RANK"])
        with urllib.request.urlopen(f"http://127.0.0.1:{int(os.environ[PORT]) + rank}/metrics", timeout=READ_S) as page:
            (Path(args.output_dir) / f"metrics-{rank}.txt").write_bytes(page.read())


def main() -> None:
    with socket.socket() as free:  # each rank takes a free port, whatever the other's is
        free.bind(("127.0.0.1", 0))
        os.environ[PORT] = str(free.getsockname()[1] - int(os.environ["LOCAL_RANK"]))
    trainer_of(Path(sys.argv[1]), *sys.argv[2:], "train.report_to=[prometheus]", callbacks=[ReadsMetrics()]).train()


if __name__ == "__main__":
    main()
