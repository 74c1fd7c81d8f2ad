"""A job: what a rank is given, as JSON on standard output. Argument: a signal's number to end by, or nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading


def main() -> None:
    sys.stdout.write(
        json.dumps(
            {
                "environment": dict(os.environ),
                "arguments": sys.argv[1:],
                "main": __name__,
                "folder": os.getcwd(),  # noqa: PTH109
                "leads_a_session": os.getsid(0) == os.getpid(),
                "start_method": multiprocessing.get_start_method(),
                "signals": [str(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)],
                "threads": threading.active_count(),
                "stdin": sys.stdin.read(),
            }
        )
        + "\n"
    )
    if sys.argv[1:]:
        os.kill(os.getpid(), int(sys.argv[1]))


if __name__ == "__main__":
    main()
