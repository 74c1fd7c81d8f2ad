"""`lmms-stream`, also as `python -m lmms_stream`: the commands of cli/, and the demo, which is made of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .cli.main import main as run
from .demo.command import add_commands


def main(arguments: Sequence[str] | None = None) -> int:
    return run(arguments, others=[add_commands])


if __name__ == "__main__":
    sys.exit(main())
