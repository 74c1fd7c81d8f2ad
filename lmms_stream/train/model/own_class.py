"""A model class of the user's own, by its name in a run's file: "module:Class" or "path/to/file.py:Class"."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ...errors import ConfigError


def build_own(class_path: str, args: Mapping[str, Any], *, dtype: torch.dtype, is_empty: bool) -> torch.nn.Module:
    """The model that the class, or a function, makes of the arguments; with is_empty on the meta device.

    ConfigError for a name that leads to nothing, and for what makes no torch.nn.Module.
    """
    make = _named(class_path)
    with torch.device("meta" if is_empty else "cpu"):
        made = make(**args)
    if not isinstance(made, torch.nn.Module):
        raise ConfigError(
            f"model.class_path {class_path} makes a {type(made).__name__}, and a model is a torch.nn.Module: name its "
            "class, or a function that makes one"
        )
    return made.to(dtype)


def _named(class_path: str) -> Any:
    where, colon, name = class_path.rpartition(":")
    if not (where and colon and name):
        raise ConfigError(
            f"model.class_path {class_path!r} names no class: write it as module:Class or path/to/file.py:Class"
        )
    found = getattr(_module(where, class_path), name, None)
    if not callable(found):
        raise ConfigError(f"model.class_path {class_path}: {where} has no class {name!r}: correct the name")
    return found


def _module(where: str, class_path: str) -> ModuleType:
    if not where.endswith(".py"):
        try:
            return import_module(where)
        except ImportError as error:
            raise ConfigError(
                f"model.class_path {class_path}: module {where} cannot be imported ({error}): install it, or name its "
                "file as path/to/file.py:Class"
            ) from error
    path = Path(where)
    if not path.is_file():
        raise ConfigError(f"model.class_path {class_path}: there is no file {path.resolve()}: correct the path")
    name = f"lmms_stream_own_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
