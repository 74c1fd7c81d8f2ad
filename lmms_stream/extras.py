"""Packages of this project's extras: import a package, or raise an error that names the extra to install."""

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
    "opentelemetry.exporter.otlp.proto.http.metric_exporter": ("opentelemetry-exporter-otlp-proto-http", "metrics"),
    "opentelemetry.exporter.prometheus": ("opentelemetry-exporter-prometheus", "metrics"),
    "shtab": ("shtab", "completion"),
    "soundfile": ("soundfile", "media"),
    "streaming": ("mosaicml-streaming", "mosaicml"),
    "torchtitan": ("torchtitan", "torchtitan"),
}


def install(module: str) -> str:
    """Command that installs a module's package; MosaicML's without its bounds on NumPy and transformers."""
    package, extra = _OF[module]
    also = f" && pip install --no-deps {package}" if module == "streaming" else ""
    return f"pip install 'lmms-stream[{extra}]'{also}"


def need(module: str, *, by: str) -> Any:
    """Import and return a module; ConfigError if the module is missing. by: what needs the module, in the plural."""
    found = sys.modules.get(module)
    if found is not None:
        return found
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{by} need {_OF[module][0]}, which is missing ({error}): {install(module)}") from error
