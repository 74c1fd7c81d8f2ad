"""A model class of the user's own, by its name in a run's file: "module:Class" or "path/to/file.py:Class"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...errors import ConfigError
from ...processes.own_code import own_code


def build_own(class_path: str, args: Mapping[str, Any], *, dtype: torch.dtype, is_empty: bool) -> torch.nn.Module:
    """The model that the class, or a function, makes of the arguments; with is_empty on the meta device.

    ConfigError for a name that leads to nothing, and for what makes no torch.nn.Module.
    """
    _, make = own_code(class_path, setting="model.class_path", what="Class")
    with torch.device("meta" if is_empty else "cpu"):
        made = make(**args)
    if not isinstance(made, torch.nn.Module):
        raise ConfigError(
            f"model.class_path {class_path} makes a {type(made).__name__}, and a model is a torch.nn.Module: name its "
            "class, or a function that makes one"
        )
    return made.to(dtype)
