"""Processors that report what their process has imported. Workers import this file: it imports little."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from lmms_stream.errors import DataError
from lmms_stream.processors.multimodal import MultimodalProcessor
from lmms_stream.processors.text import TokensProcessor


class Reporting(TokensProcessor):
    """TokensProcessor, sample by sample, that writes facts about its process into a folder."""

    fill_packs = None  # type: ignore[assignment]

    def process(self, sample: Any) -> Any:
        path = Path(os.environ["REPORT_FOLDER"], f"{os.getpid()}.json")
        if not path.exists():
            facts = {"modules": sorted(sys.modules), "parent": os.getppid(), "added": os.environ.get("ADDED")}
            path.write_text(json.dumps(facts))
        return super().process(sample)


class WithoutModels(MultimodalProcessor):
    """Refuses to work where models of transformers are imported."""

    def process(self, sample: Any) -> Any:
        models = [name for name in sys.modules if name.startswith("transformers.models.")]
        if models:
            raise DataError(f"the worker has imported {models[:3]}: leave them out")
        return super().process(sample)
