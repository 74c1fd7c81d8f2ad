"""The configs of a transformers folder, and what its files call the weights of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def save_config(model: PreTrainedModel, made: Path) -> dict[str, str]:
    """Write config and generation config; the names of weights in transformers' files, with those in the model.

    transformers renames the weights of some models, and leaves out those that are tied to others. It is given a number
    instead of each, and its file says what it makes of them.
    """
    import torch
    from safetensors.torch import load_file

    parameter_of = dict(model.named_parameters(remove_duplicate=False))
    names = list(model.state_dict())
    numbers: dict[int, torch.Tensor] = {}  # by the id of a parameter: its tied names share one tensor
    as_numbers = {
        name: numbers.setdefault(id(parameter_of.get(name, name)), torch.tensor([number]))
        for number, name in enumerate(names)
    }
    model.save_pretrained(made, state_dict=as_numbers)
    path = made / "model.safetensors"
    number_of = {saved: int(number) for saved, number in load_file(path).items()}
    path.unlink()
    return {saved: names[number] for saved, number in sorted(number_of.items(), key=lambda item: item[1])}
