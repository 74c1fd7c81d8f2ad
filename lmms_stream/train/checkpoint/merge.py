"""The adapter of a checkpoint and the model under it -> one model, of which a few tensors are in memory at a time.

Each layer that has an adapter is made by itself, filled, and merged by peft's own method, so that its weights are those
of peft's `merge_and_unload` to the last bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..model.adapters import Adapter, adapter_of, name_under
from ..model.pretrained import PretrainedTensors, WholeOnlyError
from .configs import save_config
from .names import ADAPTER_NAME, BASE_CONFIGS, Dtype
from .weight_files import write_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Read = Callable[[str], torch.Tensor]  # the tensor of a name, on the CPU
_KEEPS_BASE = (True, False, None, "gaussian")  # init_lora_weights that leave the weights under an adapter as they are


def write_merged(made: Path, base: PreTrainedModel, merged: MergedTensors, *, dtype: Dtype | None) -> None:
    """Write the merged model's weights and configs to the folder `made`. base: without the adapter, and weights."""
    if dtype is not None:
        base = base.to(getattr(torch, dtype))
    for name in (ADAPTER_NAME, *BASE_CONFIGS):
        (made / name).unlink(missing_ok=True)
    saved = save_config(base, made, base.state_dict())

    def fill(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            tensor.copy_(merged.read(name))

    write_weights(made, saved.empty, saved.filled_by(fill))


class MergedTensors:
    """The tensors of a merged model, by their names in the model without the adapter.

    base: the model under the adapter; model: another one, with the adapter; both without weights. of_base: the weights
    of the former. of_adapter: reads those of the adapter by their names in the latter. WholeOnlyError for an adapter of
    which a tensor is not merged by itself.
    """

    def __init__(self, base: PreTrainedModel, model: PreTrainedModel, *, of_base: PretrainedTensors, of_adapter: Read):
        adapter = adapter_of(model)
        assert adapter is not None
        self._model, self._adapter, self._of_base, self._of_adapter = model, adapter, of_base, of_adapter
        self._layers = _layers(model, adapter)
        names = base.state_dict().keys()
        # Of a module that was trained as a whole there are two: the copy is the one that was trained.
        self._trained = {name_under(name): name for name in adapter.tensors if name_under(name) in names}
        _check_tied(base, {*self._layers, *self._trained})

    def read(self, name: str) -> torch.Tensor:
        """The tensor, on the CPU, in the number format of the model."""
        if name in self._layers:
            return self._merged(self._layers[name], name.rpartition(".")[2])
        return self._of_adapter(self._trained[name]) if name in self._trained else self._of_base.read(name)

    @torch.no_grad()
    def _merged(self, path: str, leaf: str) -> torch.Tensor:
        layer: Any = copy.deepcopy(self._model.get_submodule(path)).to_empty(device="cpu")
        for key, tensor in layer.state_dict().items():
            name = f"{path}.{key}"
            tensor.copy_(
                self._of_adapter(name) if name in self._adapter.tensors else self._of_base.read(name_under(name))
            )
        layer.merge()
        found: torch.Tensor = layer.get_base_layer().state_dict()[leaf]
        return found


def check_by_parts(config: Mapping[str, Any]) -> None:
    """WholeOnlyError for an adapter, by its config, that is none of LoRA's, or changed the weights under it."""
    if config.get("peft_type") != "LORA":
        raise WholeOnlyError(f"its adapter is of peft_type {config.get('peft_type')}")
    if config.get("init_lora_weights") not in _KEEPS_BASE:
        raise WholeOnlyError(f"init_lora_weights {config['init_lora_weights']} changes the weights under the adapter")
    if config.get("layer_replication"):
        raise WholeOnlyError("layer_replication repeats its layers")


def _layers(model: PreTrainedModel, adapter: Adapter) -> dict[str, str]:
    """Names of the tensors that a merge computes -> paths of their layers."""
    from peft.tuners import lora
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    by_themselves = {lora.Linear, lora.Embedding, lora.Conv2d, lora.Conv3d}
    leaves = ("weight", "bias") if adapter.config.get("lora_bias") else ("weight",)
    wrappers: list[str] = []
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            if type(module) is not ModulesToSaveWrapper:
                raise WholeOnlyError(f"{path} is a {type(module).__name__}")
            wrappers.append(path)
        if not isinstance(module, BaseTunerLayer):
            continue
        buffers = {name for name, _ in module.named_buffers()}
        if type(module) not in by_themselves or not buffers <= module.state_dict().keys():
            raise WholeOnlyError(f"{path} is a {type(module).__name__}")
        if any("Dora" not in type(each).__name__ for each in getattr(module, "lora_variant", {}).values()):
            raise WholeOnlyError(f"{path} is of a variant of LoRA other than DoRA")
        if any(path.startswith(f"{outer}.") for outer in wrappers):
            raise WholeOnlyError(f"{path} lies in a module that is trained as a whole")
        state = module.get_base_layer().state_dict()
        found |= {f"{path}.{leaf}": path for leaf in leaves if leaf in state}
    return found


def _check_tied(base: PreTrainedModel, changed: set[str]) -> None:
    """WholeOnlyError where a tensor that the merge changes is another one's, too."""
    tied: dict[int, list[str]] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
    for names in tied.values():
        if len(names) > 1 and changed & {*names}:
            raise WholeOnlyError(f"{names[0]} has an adapter, and is the same as {names[1]}")
