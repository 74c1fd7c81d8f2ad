"""What the server of worker_server.py imports before it forks workers: what they come to import, and no more."""

from __future__ import annotations

import importlib

from .worker_server import NEEDED, outlive_stop_signals

outlive_stop_signals()
for _name in NEEDED:
    importlib.import_module(_name)
