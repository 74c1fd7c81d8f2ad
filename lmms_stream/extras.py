"""Packages that only an extra of this project installs: an error says which one, where one is needed and missing."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from .errors import ConfigError

_OF = {  # module: the package that has it, and the extra
    "PIL": ("pillow", "media"),
    "accelerate": ("accelerate", "huggingface"),
    "av": ("av", "media"),
    "azure": ("azure-storage-blob and azure-identity", "azure"),
    "datasets": ("datasets", "huggingface"),
    "google": ("google-cloud-storage", "gcs"),
    "shtab": ("shtab", "completion"),
    "soundfile": ("soundfile", "media"),
    "streaming": ("mosaicml-streaming", "mosaicml"),
}


def install(module: str) -> str:
    """The command that installs a module's package; that of MosaicML without its bounds on NumPy and transformers."""
    package, extra = _OF[module]
    also = f" && pip install --no-deps {package}" if module == "streaming" else ""
    return f"pip install 'lmms-stream[{extra}]'{also}"


def need(module: str, *, by: str) -> Any:
    """Import a module, and return it; ConfigError where it is missing. by: what needs it, in the plural."""
    found = sys.modules.get(module)
    if found is not None:
        return found
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{by} need {_OF[module][0]}, which is missing ({error}): {install(module)}") from error
