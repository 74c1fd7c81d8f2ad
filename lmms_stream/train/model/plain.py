"""Models that are not transformers' language models, as their tasks run them: diffusers' and the user's own."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import torch

T = TypeVar("T")
DIFFUSERS_CLASS = "_class_name"  # in a config of diffusers


class PlainModel(torch.nn.Module):
    """A model that its task runs as it likes: what FSDP shards as a whole.

    A call of it is one forward pass for FSDP, so a task makes one call for the packs that it is given, and all of the
    model's parts that it runs it runs inside.
    """

    family = None
    towers: ClassVar[Mapping[str, torch.nn.Module]] = {}

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[Any], T]) -> T:
        """Return the result of `run` for the model: tensors, alone or in a mapping or tuple, which are not views."""
        return run(self.model)

    def check_processor(self, processor: object) -> None:
        """Its task knows what its inputs must be."""

    @property
    def kept_whole(self) -> list[torch.nn.Module]:
        """Blocks that are not sharded by themselves, because the model runs parts of them from outside.

        diffusers' DiT takes the condition of its last layer from its first block.
        """
        if type(self.model).__name__ == "DiTTransformer2DModel":
            blocks: Any = self.model.transformer_blocks
            return [blocks[0]]
        return []


def config_of(model: torch.nn.Module) -> dict[str, Any]:
    """The config of a model of transformers or diffusers, as JSON values; of others, nothing."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        return dict(config.to_dict())
    if hasattr(model, "to_json_string"):
        of_diffusers: Any = model
        described: dict[str, Any] = json.loads(of_diffusers.to_json_string())
        return {name: value for name, value in described.items() if name != "_diffusers_version"}
    return {}


def takes(call: Callable[..., Any], name: str) -> bool:
    """Whether a function takes an argument of this name."""
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(call).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
