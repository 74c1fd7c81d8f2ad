"""Weights -> files of safetensors as transformers writes them, with a few tensors in memory at a time.

transformers' `save_pretrained` takes all weights of a model at once. torch's HuggingFaceStorageWriter makes the bytes
of all weights of a file at once, and its consolidation joins files of safetensors that ranks wrote: those of a
checkpoint are DCP's own, and would have to be written as such first.
The format: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

import torch
from huggingface_hub import split_torch_state_dict_into_shards

from ...errors import CheckpointError
from ...freed_memory import give_back_memory
from ...storage.failures import disk_errors

SHARD_SIZE = "5GB"
AT_ONCE_BYTES = 1 << 26  # size of the tensors that are read together; a single one may be larger
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
    """Write model.safetensors (or as `stem` calls it), or several files of at most SHARD_SIZE and an index.

    weights: their shapes and types by name, on the meta device, in the order of the model. fill: reads values into
    some of them, on the CPU. CheckpointError for a type that safetensors does not have.
    """
    split = split_torch_state_dict_into_shards(
        dict(weights), filename_pattern=stem + "{suffix}.safetensors", max_shard_size=SHARD_SIZE
    )
    for file_name, names in split.filename_to_tensors.items():
        _write_file(folder / file_name, {name: weights[name] for name in names}, fill)
    if split.is_sharded:
        num_parameters = sum(math.prod(each.shape) for each in weights.values())
        index = {
            "metadata": {"total_parameters": num_parameters, **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / f"{stem}.safetensors.index.json").write_text(text)


def _write_file(
    path: Path, weights: Mapping[str, torch.Tensor], fill: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    # The widest types first, so that each tensor lies at a multiple of its item's size.
    ordered = dict(sorted(weights.items(), key=lambda item: (-item[1].itemsize, item[0])))
    with disk_errors(str(path), room="free some, or export to another folder"), path.open("wb") as file:
        file.write(_header(ordered))
        for part in _parts(ordered):
            _write_values(file, part, fill)  # its tensors are freed before the next are read
            give_back_memory()  # else the heap grows with the number of parts: not each fits where others were


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
    """Consecutive weights of AT_ONCE_BYTES at most, or one that is larger."""
    part: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if part and sum(each.nbytes for each in part.values()) + tensor.nbytes > AT_ONCE_BYTES:
            yield part
            part = {}
        part[name] = tensor
    yield part
