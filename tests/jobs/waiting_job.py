"""A job: ranks that wait. Argument: the seconds they do."""

from __future__ import annotations

import sys
import time

if __name__ == "__main__":
    sys.stdout.write("waiting\n")
    time.sleep(float(sys.argv[1]))
