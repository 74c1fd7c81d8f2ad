"""The adapter of a checkpoint -> a folder for peft, or the model with base weights and adapter merged."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import torch
from safetensors.torch import load_file, save_file

from ...errors import CheckpointError
from ...versions.transformers import without_progress
from ..model.adapters import Adapter, adapter_of, add_adapter, base_digest, name_under, peft_model, take_adapter
from ..model.pretrained import PretrainedTensors, WholeOnlyError, find_tensors
from .store import ADAPTER_NAME, BASE_CONFIGS, METADATA_NAME, Checkpoint, Dtype, Target
from .tensors import files_with, read_metadata, read_tensors, stored_tensors, tied_names
from .weight_files import (
    Read,
    chosen,
    empty_model,
    model_class_of,
    prove_written,
    save_config,
    shell_of,
    weights_or_average,
    write_weights,
    written_in,
)

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


logger = logging.getLogger("lmms_stream")
_PREFIX = "base_model.model."  # of names in peft's files


def write_adapter(
    made: Path,
    found: Checkpoint,
    target: Target,
    *,
    dtype: Dtype | None,
    merge: bool,
    average: bool,
    trust_remote_code: bool,
) -> None:
    """Write the adapter's weights, or with `merge` the whole model, to the folder `made` with the configs."""
    config = json.loads((made / ADAPTER_NAME).read_text())
    name, config["inference_mode"] = config.pop("base_model_name_or_path"), False
    if not merge:
        if (
            "init_lora_weights" in config
        ):  # PiSSA and others compute first values from a base, which has no weights here
            config["init_lora_weights"] = True
        model = add_adapter(empty_model(made, found, trust_remote_code), config)
        tensors = _read(model, found, target, average=average)
        save_adapter(model, made, tensors, dtype=dtype)
        _prove_adapter(made, found, config, tensors, trust_remote_code)
        for file in BASE_CONFIGS:
            (made / file).unlink(missing_ok=True)
        return
    if not name:
        raise CheckpointError(
            f"the model under the adapter of {found.where} was made from a config, and is in no folder: save it, and "
            "train the adapter with model.pretrained, to merge them"
        )
    parts = _Parts(made, found, target, str(name), config, average, trust_remote_code)
    try:
        _merge_by_parts(parts, dtype)
    except WholeOnlyError as reason:
        logger.warning("%s is loaded whole to merge an adapter into it: %s", name, reason)
        _merge_whole(parts, dtype)


def _prove_adapter(
    made: Path, found: Checkpoint, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], trusts: bool
) -> None:
    """Prove a written adapter, on a base model with drawn weights; see prove_written."""
    of_file = load_file(made / "adapter_model.safetensors")
    first = {name: config[name] for name in ("inference_mode", "init_lora_weights") if name in config}
    of_folder = json.loads((made / ADAPTER_NAME).read_text()) | first
    del of_folder["base_model_name_or_path"]
    model, written = (add_adapter(shell_of(made, found, trusts), each) for each in (config, of_folder))
    adapter = adapter_of(written)
    assert adapter is not None
    if missing := sorted(key for key in adapter.tensors.values() if f"{_PREFIX}{key}" not in of_file):
        raise CheckpointError(f"{found.where}: {missing[0]} was not written: export again")
    named = {name: of_file[f"{_PREFIX}{key}"] for name, key in adapter.tensors.items()}
    shapes = model.state_dict()

    def read(own: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        if name in own:
            return own[name]
        drawn = torch.Generator().manual_seed(crc32(name_under(name).encode()))
        return (torch.rand(shapes[name].shape, generator=drawn) / 8).to(shapes[name].dtype)

    prove_written(made, model, partial(read, tensors), written, partial(read, named))


class _Parts(NamedTuple):
    """Inputs of a merge. base: the folder or repository of the model under the adapter."""

    made: Path
    found: Checkpoint
    target: Target
    base: str
    config: Mapping[str, Any]
    average: bool
    trust_remote_code: bool


def _merge_by_parts(parts: _Parts, dtype: Dtype | None) -> None:
    """Write the merged model, a few tensors at a time; WholeOnlyError if this is impossible."""
    made, found, target, *_ = parts

    def empty() -> PreTrainedModel:
        model: Any = empty_model(made, found, parts.trust_remote_code)
        model.to(model.config.dtype)
        return model

    check_by_parts(parts.config)
    base, model = empty(), add_adapter(empty(), parts.config)
    unwritten = add_adapter(shell_of(made, found, parts.trust_remote_code), parts.config)
    of_base = find_tensors(parts.base, base)
    read = _reader(model, found, target, average=parts.average)
    merged = MergedTensors(base, model, of_base=of_base, of_adapter=lambda name: read([name])[name])
    _check_base(model, found, parts.base, unread=of_base)
    if splits_tied(base, model):
        untie(base)
    write_merged(made, base, merged, dtype=dtype)
    prove_written(made, unwritten, merged.read_unmerged, *written_in(made, found, parts.trust_remote_code))


def _merge_whole(parts: _Parts, dtype: Dtype | None) -> None:
    """Write the merged model, with the whole model in memory."""
    made, of_base = parts.made, model_class_of(parts.made, parts.found, parts.trust_remote_code)
    wrapped = _whole(parts, *of_base)
    merged: Any = wrapped.merge_and_unload()
    if dtype is not None:
        merged = merged.to(getattr(torch, dtype))
    for name in (ADAPTER_NAME, *BASE_CONFIGS):
        (made / name).unlink(missing_ok=True)
    with without_progress():
        merged.save_pretrained(made)
    del wrapped, merged
    written = written_in(made, parts.found, parts.trust_remote_code)
    prove_written(made, take_adapter(_whole(parts, *of_base)).float(), None, *written)


def _whole(parts: _Parts, model_class: type[PreTrainedModel], of_model: Any) -> PeftModel:
    """Return the base with the adapter of a checkpoint, as peft's model. of_model: config before the merge."""
    base = _base(parts, model_class, of_model)
    wrapped = peft_model(base, parts.config)
    model = take_adapter(wrapped)
    _check_base(model, parts.found, parts.base)
    model.load_state_dict(_read(model, parts.found, parts.target, average=parts.average), strict=False)
    if splits_tied(model, model):
        untie(model)
    return wrapped


def save_adapter(
    model: PreTrainedModel, folder: Path, tensors: Mapping[str, torch.Tensor], *, dtype: Dtype | None = None
) -> None:
    """Write the weights of a model's adapter in the format of peft."""
    adapter = adapter_of(model)
    assert adapter is not None
    typed = tensors if dtype is None else {name: each.to(getattr(torch, dtype)) for name, each in tensors.items()}
    named = {f"{_PREFIX}{adapter.tensors[name]}": tensor.contiguous() for name, tensor in typed.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _check_base(
    model: PreTrainedModel, found: Checkpoint, name: str, *, unread: PretrainedTensors | None = None
) -> None:
    """Raise CheckpointError if the adapter was trained on other base weights."""
    adapter = adapter_of(model)
    assert adapter is not None
    digest, saved = base_digest(model, adapter, unread=unread), found.state["fingerprint"]["adapter"]["base"]
    if digest != saved:
        raise CheckpointError(
            f"{name} is not the base model of the adapter at {found.where} (digest {digest}, in training {saved}): "
            "restore the base model at this path"
        )


def _base(parts: _Parts, model_class: type[PreTrainedModel], of_model: Any) -> PreTrainedModel:
    """Load the base model of an adapter again from the original place."""
    name, found = parts.base, parts.found
    try:
        base: PreTrainedModel = model_class.from_pretrained(
            name, config=of_model, dtype=of_model.dtype, trust_remote_code=parts.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{name}, the model under the adapter of {found.where}, cannot be loaded ({' '.join(str(error).split())}): "
            "restore it at this path"
        ) from error
    return base


def _read(model: PreTrainedModel, found: Checkpoint, target: Target, *, average: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's adapter, or their average, by their names in the model."""
    adapter = adapter_of(model)
    assert adapter is not None
    return _reader(model, found, target, average=average)(sorted(adapter.tensors))


def _reader(
    model: PreTrainedModel, found: Checkpoint, target: Target, *, average: bool
) -> Callable[[Sequence[str]], dict[str, torch.Tensor]]:
    """Return a function: names in the model -> tensors of the model's adapter, or their average."""
    adapter = adapter_of(model)
    assert adapter is not None
    metadata = read_metadata(target.fetch(found, [METADATA_NAME]))
    stored = stored_tensors(metadata, "model.")
    if missing := sorted(adapter.tensors.keys() - stored.keys()):
        raise CheckpointError(f"{found.where} lacks {missing[0]} and {len(missing) - 1} more tensors of its adapter")
    choice = weights_or_average(metadata, found, model.state_dict(), tied=tied_names(model), average=average)
    folder = target.fetch(found, files_with(metadata, chosen(choice, dict.fromkeys(adapter.tensors))))

    def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
        tensors = {name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype) for name in names}
        read_tensors(folder, chosen(choice, tensors), metadata=metadata)
        return tensors

    return read


# The adapter of a checkpoint and the base model -> a merged model, with a few tensors in memory at a time.
#
# Each layer with an adapter is made by itself, filled, and merged by peft's own method: the weights equal the weights
# of peft's `merge_and_unload` to the last bit.

_KEEPS_BASE = (True, False, None, "gaussian")  # values of init_lora_weights without a change of the base weights


def write_merged(made: Path, base: PreTrainedModel, merged: MergedTensors, *, dtype: Dtype | None) -> None:
    """Write the merged model's weights and configs to the folder `made`. base: a model without adapter and weights."""
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

    base: the model without the adapter; model: another instance with the adapter; both without weights. of_base: the
    weights of `base`. of_adapter: reads the adapter's weights by their names in `model`. Raises WholeOnlyError if a
    tensor of the adapter cannot be merged by itself.
    """

    def __init__(self, base: PreTrainedModel, model: PreTrainedModel, *, of_base: PretrainedTensors, of_adapter: Read):
        adapter = adapter_of(model)
        assert adapter is not None
        self._model, self._adapter, self._of_base, self._of_adapter = model, adapter, of_base, of_adapter
        self._layers = _layers(model, adapter)
        names = base.state_dict().keys()
        # A module trained as a whole is in the model twice: the copy was trained.
        self._trained = {name_under(name): name for name in adapter.tensors if name_under(name) in names}

    def read_unmerged(self, name: str) -> torch.Tensor:
        """Return a tensor of the model with the adapter."""
        return self._of_adapter(name) if name in self._adapter.tensors else self._of_base.read(name_under(name))

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor, on the CPU, in the number format of the model."""
        if name in self._layers:
            return self._merged(self._layers[name], name.rpartition(".")[2])
        return self._of_adapter(self._trained[name]) if name in self._trained else self._of_base.read(name)

    @torch.no_grad()
    def _merged(self, path: str, leaf: str) -> torch.Tensor:
        layer: Any = copy.deepcopy(self._model.get_submodule(path)).to_empty(device="cpu")
        for key, tensor in layer.state_dict().items():
            tensor.copy_(self.read_unmerged(f"{path}.{key}"))
        layer.merge()
        found: torch.Tensor = layer.get_base_layer().state_dict()[leaf]
        return found


def check_by_parts(config: Mapping[str, Any]) -> None:
    """Raise WholeOnlyError if, by its config, an adapter is not LoRA, changes base weights, or repeats layers."""
    if config.get("peft_type") != "LORA":
        raise WholeOnlyError(f"its adapter is of peft_type {config.get('peft_type')}")
    if config.get("init_lora_weights") not in _KEEPS_BASE:
        raise WholeOnlyError(f"init_lora_weights {config['init_lora_weights']} changes the weights under the adapter")
    if config.get("layer_replication"):
        raise WholeOnlyError("layer_replication repeats its layers")


def _layers(model: PreTrainedModel, adapter: Adapter) -> dict[str, str]:
    """Return names of the tensors computed by a merge -> paths of their layers."""
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
            raise WholeOnlyError(f"{path} is in a module that is trained as a whole")
        state = module.get_base_layer().state_dict()
        found |= {f"{path}.{leaf}": path for leaf in leaves if leaf in state}
    return found


def splits_tied(base: PreTrainedModel, model: PreTrainedModel) -> bool:
    """Return whether an adapter changes a tensor that other names of the base share. model: with the adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    changed = {
        path for path, each in model.named_modules() if isinstance(each, BaseTunerLayer | AuxiliaryTrainingWrapper)
    }
    tied: dict[int, set[str]] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), set()).add(name_under(name).rpartition(".")[0])
    return any(len(paths) > 1 and changed & paths for paths in tied.values())


def untie(model: PreTrainedModel) -> None:
    """Give head and embedding tensors of their own, here and in the config; CheckpointError for other tied tensors."""
    configs: Any = {id(each): each for each in (model.config, model.config.get_text_config())}
    for each in configs.values():
        each.tie_word_embeddings = False
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                setattr(module, name, torch.nn.Parameter(parameter.detach().clone(), requires_grad=False))
            seen.add(id(parameter))
