"""Configs and weights of a checkpoint's model -> files of safetensors, a few tensors in memory at a time.

transformers' `save_pretrained` takes all weights of a model at once. torch's HuggingFaceStorageWriter makes the bytes
of all weights of a file at once, and the consolidation joins files of safetensors written by ranks: files of a
checkpoint have DCP's own format, and would first have to be written in safetensors. safetensors' save_file holds a
whole file in memory: 1027 MiB for 1 GiB of weights, compared with 67 MiB and less time here.
The format: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import gc
import json
import logging
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any
from zlib import crc32

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import Metadata
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from ...errors import CheckpointError, ConfigError, LmmsStreamError
from ...freed_memory import give_back_memory
from ...storage.failures import disk_errors
from ...versions.transformers import KEEPS_NAMES, as_in_files, without_progress
from ..model.adapters import run_module
from ..model.build import class_of_family, class_of_slow_frames, parameters_on_meta
from ..model.model import run_drawn
from ..model.pretrained import WholeOnlyError, find_tensors
from .store import Checkpoint
from .tensors import Tensors, stored_tensors

logger = logging.getLogger("lmms_stream")
# The configs of a transformers folder, and the weights by their names in files.


Fill = Callable[[dict[str, torch.Tensor]], None]  # reads values into tensors, by their names


def save_config(model: PreTrainedModel, made: Path, empty: Mapping[str, torch.Tensor]) -> WeightsInFiles:
    """Write config and generation config; return the weights by their names in transformers' files.

    transformers renames the weights of some models and leaves out tied weights. To find the new names, each weight is
    replaced by a number, and the file written by transformers is read. empty: the weights by their names in the model,
    on the meta device.
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
    """The weights of a model in the form of files: renamed, split, or joined.

    empty: weights by their names in files, on the meta device, in the order of the files. sources: names in the model.
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
        self._made: dict[tuple[str, ...], Mapping[str, torch.Tensor]] = {}  # made by the last fill

    def filled_by(self, fill: Fill) -> Fill:
        """Return a function to fill tensors by names in files. fill: by names in the model.

        The sources of split weights are read only once if the parts are requested in order.
        """

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
    """A tensor with the names of the tensors in its computation."""

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


SHARD_SIZE = "5GB"
AT_ONCE_BYTES = 1 << 26  # total size of tensors read together; a single tensor may be larger
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_weights(
    folder: Path,
    weights: Mapping[str, torch.Tensor],
    fill: Callable[[dict[str, torch.Tensor]], None],
    *,
    stem: str = "model",
) -> None:
    """Write model.safetensors (`stem` for model), or several files of at most SHARD_SIZE and an index.

    weights: shapes and types by name, on the meta device, in the order of the model. fill: reads values into some
    weights, on the CPU. Raises CheckpointError for a type unknown to safetensors.
    """
    split = split_torch_state_dict_into_shards(
        dict(weights), filename_pattern=stem + "{suffix}.safetensors", max_shard_size=SHARD_SIZE
    )
    for file_name, names in split.filename_to_tensors.items():
        path, of_file = folder / file_name, [(name, weights[name]) for name in names]
        # The widest types first: each tensor begins at a multiple of its item's size.
        ordered = dict(sorted(of_file, key=lambda item: (-item[1].itemsize, item[0])))
        with disk_errors(str(path), room="free some, or export to another folder"), path.open("wb") as file:
            file.write(_header(ordered))
            for part in _parts(ordered):
                _write_values(file, part, fill)  # the tensors are freed before the next part is read
                give_back_memory()  # otherwise the heap grows with the number of parts: some do not fit into freed gaps
    if split.is_sharded:
        num_parameters = sum(math.prod(each.shape) for each in weights.values())
        index = {
            "metadata": {"total_parameters": num_parameters, **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / f"{stem}.safetensors.index.json").write_text(text)


def _write_values(
    file: IO[bytes], weights: Mapping[str, torch.Tensor], fill: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    tensors = {name: torch.empty_like(tensor, device="cpu") for name, tensor in weights.items()}
    fill(tensors)
    for tensor in tensors.values():
        file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _header(weights: Mapping[str, torch.Tensor]) -> bytes:
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in weights.items():
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(f"{name} is {tensor.dtype}, which safetensors does not have: export with a dtype")
        stop = start + tensor.nbytes
        fields[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _parts(weights: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield consecutive weights of at most AT_ONCE_BYTES together, or a single larger weight."""
    part: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if part and sum(each.nbytes for each in part.values()) + tensor.nbytes > AT_ONCE_BYTES:
            yield part
            part = {}
        part[name] = tensor
    yield part


# The weights for an export, or their average.


Choice = Mapping[str, tuple[str, str]]  # name in the model -> part of the checkpoint, and name in this part


def weights_or_average(
    metadata: Metadata, found: Checkpoint, names: Iterable[str], *, tied: Mapping[str, str], average: bool
) -> Choice:
    """Return the choice for names in a model. Frozen weights have no average; CheckpointError without any average.

    tied: see tied_names; tied names share the average of the first.
    """
    if not average:
        return {name: ("model", name) for name in names}
    averaged = stored_tensors(metadata, "average.")
    if not averaged:
        raise CheckpointError(f"{found.where} holds no average of its weights: train with ema_decay, or export without")
    first = {name: tied.get(name, name) for name in names}
    return {name: ("average", first[name]) if first[name] in averaged else ("model", name) for name in first}


def chosen(choice: Choice, values: Mapping[str, Any]) -> Tensors:
    """Return values, given by names in the model, by parts and names in the checkpoint."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        part, stored = choice[name]
        found.setdefault(part, {})[stored] = value
    return found


# The model of a checkpoint without weights, from its config.


def model_class_of(folder: Path, found: Checkpoint, trust_remote_code: bool) -> tuple[type[PreTrainedModel], Any]:
    """Return class and config of a checkpoint's model; ConfigError for untrusted code. folder: has the config."""
    said = json.loads((folder / "config.json").read_text())
    own = said.get("auto_map") or {}
    if own and not trust_remote_code:
        raise ConfigError(
            f"{found.where} belongs to a model with its own Python files, which can run any code: read the files, and "
            "export with --trust-remote-code if you trust the files"
        )
    family_class = class_of_family(said.get("model_type", "")) or class_of_slow_frames(said)
    if family_class is not None:
        return family_class, family_class.config_class.from_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    for auto, name in own.items():
        if auto.startswith("AutoModel"):
            of_files: type[PreTrainedModel] = get_class_from_dynamic_module(name, folder)
            return of_files, config
    name = (config.architectures or [""])[0]
    model_class = getattr(transformers, name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        raise CheckpointError(f"{found.where}: transformers {transformers.__version__} has no model {name!r}")
    return model_class, config


def empty_model(folder: Path, found: Checkpoint, trust_remote_code: bool) -> PreTrainedModel:
    """Return the model on the meta device."""
    model_class, config = model_class_of(folder, found, trust_remote_code)
    with torch.device("meta"):
        model: PreTrainedModel = model_class(config)
    if (folder / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


# Proof of an export: the written model computes what the checkpoint's model computes, layer by layer.

Read = Callable[[str], torch.Tensor]  # a tensor of a model by its name, on the CPU
_NUM_TOKENS = 16
_COLLECTED_BYTES = 1 << 28  # of weights, before their memory is given back
_MOST_DRAWS = 16  # of roundings
_MOST_ROUNDINGS = 2.0  # differences up to so many times the effect of rounding each weight
_SMALLEST_ROUNDING = 2.0**-20  # relative: sums in float32 round more than float32 weights


class _AtUse(torch.Tensor):
    """A weight, read again at each use: memory holds only the weights of the current operation."""

    read: Callable[[], torch.Tensor]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(_AtUse, lambda each: each.read(), (args, kwargs or {}))
        return function(*args, **kwargs)


def shell_of(folder: Path, found: Checkpoint, trust_remote_code: bool) -> PreTrainedModel:
    """Return the model of a folder with values only in its buffers, for `prove_written`."""
    model_class, config = model_class_of(folder, found, trust_remote_code)
    with parameters_on_meta():
        model: PreTrainedModel = model_class(config)
    model.tie_weights()
    return model.float()


def written_in(folder: Path, found: Checkpoint, trust_remote_code: bool) -> tuple[PreTrainedModel, Read]:
    """Return the model in a folder as from_pretrained loads it, and a function to read its tensors."""
    model = shell_of(folder, found, trust_remote_code)
    try:
        return model, find_tensors(str(folder), model).read
    except WholeOnlyError:
        model_class, config = model_class_of(folder, found, trust_remote_code)
        loaded: PreTrainedModel = model_class.from_pretrained(
            folder, config=config, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
        return loaded, dict(loaded.state_dict()).__getitem__


def prove_written(
    folder: Path, model: PreTrainedModel, read: Read | None, written: PreTrainedModel, read_written: Read
) -> None:
    """Raise CheckpointError if the written model of a folder differs from a checkpoint's model by more than rounding.

    Each layer of both models runs in float32 on the layer's inputs in `model`, for token ids and media drawn by a
    seed. A difference may be twice the effect of changing each written weight by its largest rounding, up or down by
    chance: the largest effect of _MOST_DRAWS, because a sum of few weights may hardly change by chance. Other layers
    get drawn inputs, or their weights are compared. read: None for a model with weights.
    """
    noise, drawn, rounding = {"size": 0.0, "seed": 0}, torch.Generator().manual_seed(0), _rounding_in(folder)
    if read is not None:
        _read_at_use(model, read, {"size": 0.0})
    _read_at_use(written.eval(), read_written, noise)
    layers = dict(model.eval().named_modules())
    # peft changes the weights of a whole module while the adapter around the module runs
    wholes = tuple(f"{path}." for path, each in layers.items() if hasattr(each, "parameter_name"))
    waiting = {  # layers: with weights of their own, adapters, or without parts
        path: each
        for path, each in written.named_modules()
        if (each._parameters or hasattr(each, "base_layer") or not any(each.children()))
        and (".lora_" in path or not path.startswith(wholes))
    }

    def compare(path: str, args: Any, kwargs: Any, expected: Any) -> None:
        leaves, found = _numbers(expected), _numbers(waiting[path](*args, **kwargs))
        differences = [float((one - two).norm()) for one, two in zip(leaves, found, strict=True)]
        most = [0.0] * len(leaves)
        for noise["seed"] in range(_MOST_DRAWS):
            if not any(map(operator.gt, differences, most)):
                return
            noise["size"] = max(rounding, _SMALLEST_ROUNDING)
            changed = _numbers(waiting[path](*args, **kwargs))
            noise["size"] = 0.0
            effects = [_MOST_ROUNDINGS * float((one - two).norm()) for one, two in zip(changed, found, strict=True)]
            most = [*map(max, most, effects)]
        for difference, allowed in zip(differences, most, strict=True):
            if difference > allowed:
                raise CheckpointError(
                    f"the written model is not the checkpoint's: {path} differs by {difference:.3g} on drawn inputs, "
                    f"and rounding explains {allowed:.3g}. Nothing is exported; please report the model and its adapter"
                )

    def hook(path: str, _: Any, args: Any, kwargs: Any, output: Any) -> None:
        try:
            if path in waiting:
                compare(path, args, kwargs, output)
        except LmmsStreamError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"the written model is not the checkpoint's: {path} does not run ({error})"
            ) from error
        waiting.pop(path, None)

    def tried(run: Callable[[], Any]) -> None:
        try:
            run()
        except LmmsStreamError:
            raise
        except Exception as error:  # noqa: BLE001  # a model's own code raises many kinds of errors
            logger.warning("layers of the model are compared alone, because it does not run here: %s", error)

    for path in waiting.keys() & layers.keys():
        layers[path].register_forward_hook(partial(hook, path), with_kwargs=True)
    with torch.no_grad():
        tried(partial(run_drawn, model, folder, drawn, num_tokens=_NUM_TOKENS))
        for path, layer in [*waiting.items()]:
            if path not in layers:
                raise CheckpointError(f"the written model has {path}, which the checkpoint's model does not have")
            if (given := _drawn_input(layer, drawn)) is not None:
                tried(partial(layers[path], given))
            for name, tensor in {**layer._parameters, **layer._buffers}.items() if path in waiting else ():
                if tensor is not None and name not in layer._non_persistent_buffers_set:
                    (one,), (two,) = _numbers(getattr(run_module(layers[path]), name) + 0), _numbers(tensor + 0)
                    if one.shape != two.shape or ((one - two).abs() > 2 * rounding * one.abs()).any():
                        raise CheckpointError(f"the written model is not the checkpoint's: {path}.{name} differs")


def _rounding_in(folder: Path) -> float:
    """Return the largest relative error of rounding to the number formats of the weights in a folder."""
    formats = {torch_name: dtype for dtype, torch_name in _DTYPES.items() if dtype.is_floating_point}
    found = [0.0]
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as opened:
            kinds = {opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118  # not a mapping
        found += [torch.finfo(formats[each]).eps / 2 for each in kinds & formats.keys()]
    return max(found)


def _numbers(found: Any) -> list[torch.Tensor]:
    """Return the tensors in a result, in float32, without infinity and NaN: equal places of these are equal."""
    tensors = [each for each in tree_leaves(found) if torch.is_tensor(each)]
    tensors = [(torch.view_as_real(each) if each.is_complex() else each).float() for each in tensors]
    return [torch.nan_to_num(each, nan=1e9, posinf=1e10, neginf=-1e10) for each in tensors]


def _read_at_use(model: torch.nn.Module, read: Read, noise: Mapping[str, float]) -> None:
    """Replace the tensors of a model by tensors read at each use, changed up or down by chance by the noise's size."""

    num_bytes = 0

    def values(name: str) -> torch.Tensor:
        nonlocal num_bytes
        tensor = read(name)
        num_bytes += tensor.nbytes
        if num_bytes > _COLLECTED_BYTES:
            gc.collect()  # reading a checkpoint leaves circles of objects with its tensors
            give_back_memory()
            num_bytes = 0
        if not tensor.is_floating_point():
            return tensor
        seed = crc32(name.encode()) + int(noise.get("seed", 0))
        signs = torch.randint(0, 2, tensor.shape, generator=torch.Generator().manual_seed(seed))
        return tensor.float() * (1 + noise["size"] * (2 * signs - 1)) if noise["size"] else tensor.float()

    for name, like in model.state_dict().items():
        path, _, leaf = name.rpartition(".")
        dtype = torch.float32 if like.is_floating_point() else like.dtype
        weight: Any = torch.Tensor._make_wrapper_subclass(_AtUse, like.shape, dtype=dtype)
        weight.read = partial(values, name)
        module = model.get_submodule(path)
        (module._parameters if leaf in module._parameters else module._buffers)[leaf] = weight


def _drawn_input(layer: torch.nn.Module, drawn: torch.Generator) -> torch.Tensor | None:
    if isinstance(layer, torch.nn.Linear):
        return torch.randn(_NUM_TOKENS, layer.in_features, generator=drawn)
    if isinstance(layer, torch.nn.Embedding):
        return torch.randint(0, layer.num_embeddings, (_NUM_TOKENS,), generator=drawn)
    if isinstance(layer, torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d):
        return torch.randn(_NUM_TOKENS, layer.in_channels, *layer.kernel_size, generator=drawn)
    return None
