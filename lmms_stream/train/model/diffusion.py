"""Models of diffusers, by their names or configs, as a run's file names them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ...errors import ConfigError
from .plain import DIFFUSERS_CLASS


def diffusers_config(pretrained: str | None, config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The config of a model of diffusers, which names its class; None for another's, and for a hub id."""
    if config is None and pretrained is not None and (path := Path(pretrained) / "config.json").is_file():
        config = json.loads(path.read_text())
    return config if config is not None and DIFFUSERS_CLASS in config else None


def build_diffusers(
    config: Mapping[str, Any], pretrained: str | None, *, dtype: torch.dtype, is_empty: bool
) -> torch.nn.Module:
    """The model; with is_empty on the meta device. ConfigError without diffusers, and for a class that it lacks."""
    if find_spec("diffusers") is None:
        raise ConfigError(f"model {config[DIFFUSERS_CLASS]} needs diffusers: pip install 'lmms-stream[generation]'")
    import diffusers

    found: object = getattr(diffusers, str(config[DIFFUSERS_CLASS]), None)
    kind: Any = found
    if not (isinstance(found, type) and issubclass(found, diffusers.ModelMixin)):
        raise ConfigError(
            f"diffusers {diffusers.__version__} has no model {config[DIFFUSERS_CLASS]!r}: correct {DIFFUSERS_CLASS}"
        )
    if pretrained is not None and not is_empty:
        loaded: torch.nn.Module = kind.from_pretrained(pretrained, torch_dtype=dtype)
        return loaded
    with torch.device("meta" if is_empty else "cpu"):
        made: torch.nn.Module = kind.from_config(dict(config))
    return made.to(dtype)
