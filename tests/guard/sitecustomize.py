"""Log the collectives of an interpreter with this folder in PYTHONPATH; see tests/guard."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _AfterImport:
    """Finder that calls collective_log.begin when torch.distributed has been imported."""

    name = "torch.distributed.distributed_c10d"

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name != self.name:
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_begin(module: ModuleType) -> None:
            execute(module)
            sys.path.append(__file__.rpartition(os.sep)[0])
            importlib.import_module("collective_log").begin(module)

        spec.loader.exec_module = execute_and_begin  # type: ignore[method-assign]
        return spec


if os.environ.get("LMMS_STREAM_COLLECTIVES"):
    sys.meta_path.insert(0, _AfterImport())
