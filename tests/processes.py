"""Processes that tests start often, forked from a server that has imported what they use (preloaded.py).

They are processes of their own, with exit statuses, signals and memory of their own. The server has one thread and
runs nothing of what it has imported, so that no fork copies a lock that is held.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

PROCESSES: ForkServerContext = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.preloaded"])
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200"}  # of child processes


def start_server() -> None:
    """Start the server, which otherwise starts with the first process, with one thread for each process in OpenMP.

    OpenMP reads its number of threads where it is loaded; one is what torchrun sets for its ranks.
    """
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before
