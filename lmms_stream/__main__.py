"""`python -m lmms_stream` is `lmms-stream`."""

import sys

from .cli import main

sys.exit(main())
