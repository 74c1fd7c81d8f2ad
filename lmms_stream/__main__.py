"""`lmms-stream`, also as `python -m lmms_stream`."""

from __future__ import annotations

import sys

from .cli.main import main as main

if __name__ == "__main__":
    sys.exit(main())
