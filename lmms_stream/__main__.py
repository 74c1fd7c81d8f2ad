"""`python -m lmms_stream` is `lmms-stream`."""

import sys

from .cli.main import main

sys.exit(main())
