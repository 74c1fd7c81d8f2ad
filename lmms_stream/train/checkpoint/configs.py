"""The configs of a transformers folder, and the weights of a model as its files hold them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch.utils._pytree import tree_leaves

from ...versions.transformers import KEEPS_NAMES, as_in_files, without_progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Fill = Callable[[dict[str, torch.Tensor]], None]  # reads values into tensors, by their names


def save_config(model: PreTrainedModel, made: Path, empty: Mapping[str, torch.Tensor]) -> WeightsInFiles:
    """Write config and generation config; the weights of transformers' files.

    transformers renames the weights of some models and leaves out tied ones. To learn the new names, each weight is
    replaced by a number, and the file that transformers writes is read. empty: the weights by their names in the
    model, on the meta device.
    """
    parameter_of = dict(model.named_parameters(remove_duplicate=False))
    names = list(model.state_dict())
    numbers: dict[int, torch.Tensor] = {}  # by the id of a parameter: its tied names share one tensor
    as_numbers = {
        name: numbers.setdefault(id(parameter_of.get(name, name)), torch.tensor([number]))
        for number, name in enumerate(names)
    }
    with without_progress():  # of numbers
        model.save_pretrained(made, state_dict=as_numbers, **KEEPS_NAMES)
    path = made / "model.safetensors"
    number_of = {saved: int(number) for saved, number in load_file(path).items()}
    path.unlink()
    in_order = sorted(number_of.items(), key=lambda item: item[1])
    return WeightsInFiles(model, {saved: names[number] for saved, number in in_order}, empty)


class WeightsInFiles:
    """The weights of a model as they are in files: renamed, or parts of them, or joined of several.

    empty: by their names in files, on the meta device, in the order of the files. sources: names in the model.
    """

    def __init__(self, model: PreTrainedModel, name_of: Mapping[str, str], empty: Mapping[str, torch.Tensor]):
        self._model, self._name_of, self._of_model = model, name_of, empty
        self.sources = list(name_of.values())
        before = {saved: _Traced.of(empty[name], saved) for saved, name in name_of.items()}
        after = as_in_files(model, {**before})
        self.empty = {saved: torch.empty(each.shape, dtype=each.dtype, device="meta") for saved, each in after.items()}
        self._renamed = {
            saved: name_of[each.made_of[0]]
            for saved, each in after.items()
            if len(each.made_of) == 1 and each is before[each.made_of[0]]
        }
        self._made_of = {saved: each.made_of for saved, each in after.items()}
        self._made: dict[tuple[str, ...], Mapping[str, torch.Tensor]] = {}  # of what was filled last

    def filled_by(self, fill: Fill) -> Fill:
        """fill: by names in the model. What parts are made of is read once, as long as they are asked for in order."""

        def fill_saved(tensors: dict[str, torch.Tensor]) -> None:
            if renamed := {self._renamed[saved]: each for saved, each in tensors.items() if saved in self._renamed}:
                fill(renamed)
            others = [saved for saved in tensors if saved not in self._renamed]
            wanted = dict.fromkeys(self._made_of[saved] for saved in others)
            self._made = {key: made for key, made in self._made.items() if key in wanted}
            for key in wanted:
                if key not in self._made:
                    self._made[key] = self._make(key, fill)
            for saved in others:
                tensors[saved].copy_(self._made[self._made_of[saved]][saved])

        return fill_saved

    def _make(self, names: Sequence[str], fill: Fill) -> Mapping[str, torch.Tensor]:
        whole = {
            self._name_of[name]: torch.empty_like(self._of_model[self._name_of[name]], device="cpu") for name in names
        }
        fill(whole)
        return as_in_files(self._model, {name: whole[self._name_of[name]] for name in names})


class _Traced(torch.Tensor):
    """A tensor that keeps the names of the tensors it was computed from."""

    made_of: tuple[str, ...] = ()

    @staticmethod
    def of(tensor: torch.Tensor, name: str) -> _Traced:
        made: Any = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").as_subclass(_Traced)
        made.made_of = (name,)
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, _Traced)]
        for each in tree_leaves(made):
            if isinstance(each, _Traced) and not any(each is one for one in given):
                each.made_of = tuple(dict.fromkeys(name for one in given for name in one.made_of))
        return made
