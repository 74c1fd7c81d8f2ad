"""A checkpoint, or the current model -> a folder for `from_pretrained`; of an adapter, a folder for peft."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Container, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from ...errors import CheckpointError, ConfigError, LmmsStreamError, StorageError
from ...storage.failures import disk_errors
from ..model.adapters import adapter_of
from ..model.build import DIFFUSERS_CLASS, config_of
from ..run.distributed import from_rank_0
from .export_adapter import save_adapter, write_adapter
from .store import (
    ADAPTER_NAME,
    BASE_CONFIGS,
    METADATA_NAME,
    MODEL_FOLDER,
    TIED,
    Checkpoint,
    Dtype,
    Target,
    checkpoints_of,
    folder_name,
    open_target,
    read_checkpoint,
    split_path,
)
from .tensors import files_with, read_metadata, read_tensors, stored_tensors, tied_names
from .weight_files import (
    chosen,
    empty_model,
    prove_written,
    save_config,
    shell_of,
    weights_or_average,
    write_weights,
    written_in,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


MARKER_NAME = "export.json"  # lists the files of an export; another export may replace them


def model_files(model: PreTrainedModel, tokenizer: str | None, *, trust_remote_code: bool = False) -> dict[str, bytes]:
    """Return the files of a transformers folder except weights, by names in a checkpoint; with an adapter's config.

    tokenizer: folder or hub id of a tokenizer, or of a processor with a tokenizer. Raises ConfigError if loading fails.
    """
    from transformers.dynamic_module_utils import custom_object_save

    if is_plain(model):
        return {f"{MODEL_FOLDER}/config.json": plain_config(model)}

    config: Any = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    texts = {"config.json": config.to_json_string()}
    if (generation := getattr(model, "generation_config", None)) is not None:  # transformers 5: some models lack it
        texts["generation_config.json"] = generation.to_json_string()
    if (adapter := adapter_of(model)) is not None:
        texts[ADAPTER_NAME] = json.dumps({**adapter.config, "inference_mode": True}, indent=2, sort_keys=True) + "\n"
    files = {name: text.encode() for name, text in texts.items()}
    if is_own_code(model):
        with TemporaryDirectory() as folder:
            custom_object_save(model, folder, config=config)
            custom_object_save(config, folder, config=config)
            files |= {path.name: path.read_bytes() for path in Path(folder).glob("*.py")}
            files["config.json"] = config.to_json_string().encode()
    if tokenizer:
        with TemporaryDirectory() as folder:
            _save_tokenizer(tokenizer, folder, trust_remote_code)
            saved = [path for path in Path(folder).rglob("*") if path.is_file()]  # other chat templates are in a folder
            files |= {path.relative_to(folder).as_posix(): path.read_bytes() for path in saved}
    return {f"{MODEL_FOLDER}/{name}": data for name, data in files.items()}


def is_own_code(model: PreTrainedModel) -> bool:
    """Whether the class of a model comes from Python files next to the weights."""
    return getattr(type(model), "_auto_class", None) is not None


def _save_tokenizer(name: str, folder: str, trust_remote_code: bool) -> None:
    import transformers
    from transformers.utils.hub import cached_file

    try:
        has_processor = any(
            cached_file(name, part, _raise_exceptions_for_missing_entries=False) is not None
            for part in ("processor_config.json", "preprocessor_config.json")
        )
        loader: Any = transformers.AutoProcessor if has_processor else transformers.AutoTokenizer
        loader.from_pretrained(name, trust_remote_code=trust_remote_code).save_pretrained(folder)
    except (OSError, ValueError, ImportError) as error:  # some processors need a library, named in the error
        raise ConfigError(f"tokenizer {name!r} cannot be loaded: {str(error).strip().splitlines()[0]}") from error


def export_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: Dtype | None = None,
    merge: bool = False,
    average: bool = False,
    trust_remote_code: bool = False,
) -> Path:
    """Write the model of a checkpoint (a folder or URL) to the folder `out`, and return `out`. Needs no process group.

    The folder has shards of safetensors, config, generation config, and the files of tokenizer and processor. The
    folder appears whole or not at all. `out` may be new, empty, or an earlier export, then replaced. Raises ConfigError
    for another `out`, CheckpointError and StorageError.

    dtype: of the weights (default: as trained). merge: add the weights of an adapter to the base model, read from the
    original place; the base is loaded whole only if single tensors cannot be read. Without merge, an adapter is written
    as peft's folder. average: write the average of the weights. trust_remote_code: run the model's own Python files,
    stored in the checkpoint.
    """
    out = Path(out)
    check_out(out)
    folder, step = split_path(str(checkpoint))
    if step is None:
        raise CheckpointError(f"{checkpoint} is not a checkpoint: {_those_of(str(checkpoint))}")
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.", suffix=".tmp") as temporary:
        target = open_target(folder, staging=Path(temporary) / "staging")
        if step not in target.candidates():
            raise CheckpointError(f"{checkpoint} does not exist: {_those_of(folder)}")
        found = read_checkpoint(target.storage, step)
        documents = [name for name in found.files if name.startswith(f"{MODEL_FOLDER}/")]
        stored = target.fetch(found, [METADATA_NAME, *documents])
        made = Path(temporary) / "model"
        shutil.copytree(stored / MODEL_FOLDER, made)
        if (made / ADAPTER_NAME).exists():
            write_adapter(
                made, found, target, dtype=dtype, merge=merge, average=average, trust_remote_code=trust_remote_code
            )
        elif merge:
            raise ConfigError(f"{checkpoint} has a whole model and no adapter to merge: export it without --merge")
        elif (stem := weights_stem(json.loads((made / "config.json").read_text()))) is not None:
            write_plain_weights(made, found, target, stem=stem, dtype=dtype, average=average)
        else:
            _write_weights(made, found, target, dtype=dtype, average=average, trust_remote_code=trust_remote_code)
        _put_in_place(made, out, found)
    return out


def _those_of(run: str) -> str:
    """Return a remedy with the checkpoints of a run: in this folder, or of the run with this output_dir."""
    for folder in (run.rstrip("/"), checkpoints_of(run)):
        with TemporaryDirectory() as staging:
            steps = open_target(folder, staging=Path(staging)).candidates()
        if steps:
            return f"name one of {', '.join(f'{folder}/{folder_name(step)}' for step in steps[-5:])}"
    return f"{run} holds no checkpoint; name a folder step-NNNNNNNN below the checkpoint_dir of a run"


def check_out(out: Path) -> None:
    """Raise ConfigError if `out` holds anything but an earlier export."""
    if not out.exists():
        return
    if not out.is_dir():
        raise ConfigError(f"{out} is a file: name another folder for the export")
    try:
        ours = {MARKER_NAME, *json.loads((out / MARKER_NAME).read_text())["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        ours = set()
    if strange := sorted({path.name for path in out.iterdir()} - ours):
        raise ConfigError(f"{out} holds {strange[0]}, which no export wrote: name an empty or new folder")


def _put_in_place(made: Path, out: Path, found: Checkpoint) -> None:
    files = sorted(path.name for path in made.iterdir())
    marker = {"checkpoint": found.where, "step": found.step, "files": files}
    (made / MARKER_NAME).write_text(json.dumps(marker, indent=1) + "\n")
    made.chmod(0o755)  # a temporary folder is readable only for the owner
    check_out(out)  # again: another process may have written to `out` meanwhile
    if out.exists():
        shutil.rmtree(out)
    made.rename(out)


def _write_weights(
    made: Path, found: Checkpoint, target: Target, *, dtype: Dtype | None, average: bool, trust_remote_code: bool
) -> None:
    """Write the files of weights, config and generation config to the folder `made`, and prove them.

    The model is cast to the type of the first floating-point weight. From a store, only files with weights are fetched.
    """
    model, unwritten = (make(made, found, trust_remote_code) for make in (empty_model, shell_of))
    metadata = read_metadata(target.fetch(found, [METADATA_NAME]))
    stored = stored_tensors(metadata, "model.")
    if missing := sorted(model.state_dict().keys() - stored.keys()):
        raise CheckpointError(f"{found.where} lacks {missing[0]} and {len(missing) - 1} more tensors of its model")
    weights = _empty({name: stored[name] for name in model.state_dict()}, dtype)
    main_dtype: Any = next(each.dtype for each in weights.values() if each.is_floating_point())
    model.to(main_dtype)
    saved = save_config(model, made, weights)
    choice = weights_or_average(metadata, found, model.state_dict(), tied=tied_names(model), average=average)
    folder = target.fetch(found, files_with(metadata, chosen(choice, dict.fromkeys(saved.sources))))

    def fill(tensors: dict[str, torch.Tensor]) -> None:
        read_tensors(folder, chosen(choice, tensors), metadata=metadata)

    write_weights(made, saved.empty, saved.filled_by(fill))

    def read(name: str) -> torch.Tensor:
        tensor = torch.empty(stored[name].size, dtype=stored[name].properties.dtype)
        fill({name: tensor})
        return tensor

    prove_written(made, unwritten, read, *written_in(made, found, trust_remote_code))


def _empty(stored: Mapping[str, TensorStorageMetadata], dtype: Dtype | None) -> dict[str, torch.Tensor]:
    """Return tensors without values, on the meta device; floating-point ones in the wanted type, if any."""
    types = {name: each.properties.dtype for name, each in stored.items()}
    wanted = {name: getattr(torch, dtype) if dtype and each.is_floating_point else each for name, each in types.items()}
    return {name: torch.empty(each.size, dtype=wanted[name], device="meta") for name, each in stored.items()}


# The current model -> a folder, by all ranks. Rank 0 gathers a few tensors at a time from the other ranks, and writes.


def save_folder(model: Any, out: Path, files: Mapping[str, bytes]) -> None:
    """Write a folder for from_pretrained: weights, configs, and `files` by name; all ranks call this.

    Of a model with an adapter, write a folder for peft.

    model: a sharded model. Raises StorageError, on all ranks, if writing fails.
    """
    adapter = adapter_of(model)
    tensors = _Gathered(model, None if adapter is None else adapter.tensors)
    failure: LmmsStreamError | None = None
    if dist.get_rank() == 0:
        try:
            with disk_errors(str(out)):
                out.mkdir(parents=True, exist_ok=True)
                if adapter is not None:
                    save_adapter(model, out, tensors.gather(tensors.names))
                elif is_plain(model):
                    save_plain(model, out, tensors.gather(tensors.names))
                else:
                    _save_pretrained(model, out, tensors)
                for name, data in files.items():
                    # transformers has written the configs; configs of an adapter's base are not saved
                    if name not in BASE_CONFIGS or (adapter is None and not (out / name).exists()):
                        (out / name).parent.mkdir(exist_ok=True)
                        (out / name).write_bytes(data)
        except LmmsStreamError as error:
            failure = error
        except Exception as error:  # noqa: BLE001  # transformers raises many kinds of errors, and the other ranks wait
            failure = StorageError(f"{out}: the model cannot be written: {' '.join(str(error).split())[:300]}")
        tensors.end()
    else:
        tensors.serve()
    if (failure := from_rank_0(failure)) is not None:
        raise failure


def _save_pretrained(model: Any, out: Path, tensors: _Gathered) -> None:
    saved = save_config(model, out, {name: tensors.empty(name) for name in tensors.names})

    def fill(wanted: dict[str, torch.Tensor]) -> None:
        found = tensors.gather([*wanted])
        for name, tensor in wanted.items():
            tensor.copy_(found[name])

    write_weights(out, saved.empty, saved.filled_by(fill))


class _Gathered:
    """The whole tensors of a sharded model, some at a time: rank 0 requests names, other ranks serve until the end.

    names: tensors to keep (default: all).
    """

    def __init__(self, model: torch.nn.Module, names: Container[str] | None):
        every: Any = get_model_state_dict(model)
        self._tensors = {name: each for name, each in every.items() if names is None or name in names}
        self.names = list(self._tensors)

    def empty(self, name: str) -> torch.Tensor:
        """Return a tensor's shape and type, on the meta device."""
        tensor = self._tensors[name]
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    def gather(self, names: list[str]) -> dict[str, torch.Tensor]:
        """Return these tensors on the CPU; only rank 0 calls this."""
        from_rank_0(names)
        return {name: self._whole(name).cpu() for name in names}

    def end(self) -> None:
        """End the requests; only rank 0 calls this."""
        from_rank_0(None)

    def serve(self) -> None:
        """Take part in the requests of rank 0 until the end."""
        asked: list[str] | None = []
        while (asked := from_rank_0(asked)) is not None:
            for name in asked:
                self._whole(name)

    def _whole(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# A model of diffusers, or of the user's own class -> a folder with weights and config, in the form of diffusers.


_MARKER = "plain_model"  # in the config of a model of neither transformers nor diffusers
_DIFFUSERS_STEM = "diffusion_pytorch_model"


def is_plain(model: torch.nn.Module) -> bool:
    """Whether a model is not a transformers model."""
    from transformers import PreTrainedModel

    return not isinstance(model, PreTrainedModel)


def plain_config(model: torch.nn.Module) -> bytes:
    """Return the config.json of a model: diffusers' own config, or the name of the class with the config."""
    config = config_of(model)
    described = config if DIFFUSERS_CLASS in config else {_MARKER: type(model).__name__, **config}
    return (json.dumps(described, indent=2, sort_keys=True, default=str) + "\n").encode()


def weights_stem(config: Mapping[str, Any]) -> str | None:
    """Return the stem of the files of weights next to a config; None for a config of transformers."""
    if DIFFUSERS_CLASS in config:
        return _DIFFUSERS_STEM
    return "model" if _MARKER in config else None


def save_plain(model: torch.nn.Module, out: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write weights and config of a model to a folder."""
    from safetensors.torch import save_file

    config = plain_config(model)
    (out / "config.json").write_bytes(config)
    kept = {name: each.clone().contiguous() for name, each in weights.items()}  # tied names get their own copies
    save_file(kept, out / f"{weights_stem(json.loads(config))}.safetensors", metadata={"format": "pt"})


def write_plain_weights(
    made: Path, found: Checkpoint, target: Target, *, stem: str, dtype: Dtype | None, average: bool
) -> None:
    """Write a checkpoint's weights to the folder `made`, by their names in the checkpoint; see export_checkpoint."""
    from safetensors.torch import load_file

    metadata = read_metadata(target.fetch(found, [METADATA_NAME]))
    stored = stored_tensors(metadata, "model.")
    choice = weights_or_average(metadata, found, stored, tied=found.state.get(TIED, {}), average=average)
    folder = target.fetch(found, files_with(metadata, chosen(choice, dict.fromkeys(stored))))

    def fill(tensors: dict[str, torch.Tensor]) -> None:
        read_tensors(folder, chosen(choice, tensors), metadata=metadata)
        filled = {choice[name]: tensor for name, tensor in tensors.items()}  # one of the tensors with the same values
        for name, tensor in tensors.items():
            tensor.copy_(filled[choice[name]])

    empty = _empty(stored, dtype)
    write_weights(made, empty, fill, stem=stem)
    for path in sorted(made.glob(f"{stem}*.safetensors")):
        for name, tensor in load_file(path).items():  # mapped, not read at once
            expected = torch.empty_like(empty.pop(name), device="cpu")
            fill({name: expected})
            if not torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (tensor, expected))):
                raise CheckpointError(f"{found.where}: {name} was written with other values: export again")
    if empty:
        raise CheckpointError(f"{found.where}: {min(empty)} was not written: export again")
