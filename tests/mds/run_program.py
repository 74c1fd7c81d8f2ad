"""Run the program at the path of the first argument, with the other arguments."""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
