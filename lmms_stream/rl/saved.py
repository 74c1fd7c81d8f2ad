"""Values of samples and counts as a JSON file and a file of arrays beside it, written atomically. No pickles.

The arrays are written first, under a name of their content, and the JSON file, which names them and their checksum,
last: so a state is the old one or the new one, whenever the writer is killed.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..errors import CheckpointError, LmmsStreamError, ObjectMissingError
from ..extras import need
from ..storage.storage import Storage
from .sample import Sample

VERSION = 1
_KIND = "__kind__"  # marks an object of JSON that stands for something else


class _Writer:
    """Turns values into JSON values, and what JSON does not hold into arrays, each once however often it is there."""

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}  # for np.savez, whose own arguments are of other types
        self._names: dict[int, str] = {}
        self._held: list[Any] = []  # kept alive, so that no other object gets the id of one of them

    def value(self, value: Any, where: str) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) is list:
            return [self.value(each, where) for each in value]
        if isinstance(value, Sample):
            named = value.to_dict().items()
            return {_KIND: "sample", "values": {name: self.value(each, f"{where}.{name}") for name, each in named}}
        if type(value) is tuple:
            return {_KIND: "tuple", "values": [self.value(each, where) for each in value]}
        if isinstance(value, Mapping):
            if all(type(name) is str for name in value) and _KIND not in value:
                return {name: self.value(each, f"{where}.{name}") for name, each in value.items()}
            pairs = [[self.value(name, where), self.value(each, where)] for name, each in value.items()]
            return {_KIND: "dict", "values": pairs}
        return self._array(value, where)

    def _array(self, value: Any, where: str) -> dict[str, Any]:
        described = _described(value)
        if described is None:
            raise CheckpointError(
                f"{where} is {type(value).__name__}, which a saved state does not hold: use numbers, texts, lists, "
                "dicts, bytes, arrays, tensors or images of PIL's, or leave it out of what is put back"
            )
        about, data = described
        if id(value) not in self._names:
            self._names[id(value)] = name = f"a{len(self.arrays)}"
            self._held.append(value)
            self.arrays[name] = data()
        return {**about, "array": self._names[id(value)]}


def _described(value: Any) -> tuple[dict[str, Any], Any] | None:
    """Return the type of an object and a function for its content as an array; None for an unknown type."""
    if isinstance(value, bytes | bytearray):
        return {_KIND: "bytes"}, lambda: np.frombuffer(bytes(value), np.uint8)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcSU":
        return {_KIND: "ndarray" if isinstance(value, np.ndarray) else "scalar"}, lambda: np.asarray(value)
    torch, image = sys.modules.get("torch"), sys.modules.get("PIL.Image")
    if torch is not None and isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous()
        about = {_KIND: "tensor", "dtype": str(plain.dtype).removeprefix("torch."), "shape": list(plain.shape)}
        return about, lambda: plain.reshape(-1).view(torch.uint8).numpy()
    if image is not None and isinstance(value, image.Image) and value.mode in ("RGB", "RGBA", "L"):
        about = {_KIND: "image", "mode": value.mode, "size": list(value.size)}
        return about, lambda: np.frombuffer(value.tobytes(), np.uint8)
    return None


def _restored(value: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    if isinstance(value, list):
        return [_restored(each, arrays) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {name: _restored(each, arrays) for name, each in value.items()}
    if kind == "sample":
        return Sample.from_dict(_restored(value["values"], arrays))
    if kind == "tuple":
        return tuple(_restored(value["values"], arrays))
    if kind == "dict":
        return {_restored(name, arrays): _restored(each, arrays) for name, each in value["values"]}
    return _restored_array(kind, value, arrays[value["array"]])


def _restored_array(kind: str, about: Mapping[str, Any], array: NDArray[Any]) -> Any:
    if kind == "bytes":
        return array.tobytes()
    if kind == "ndarray":
        return array
    if kind == "scalar":
        return array[()]
    if kind == "tensor":
        import torch

        return torch.from_numpy(array.copy()).view(getattr(torch, about["dtype"])).reshape(about["shape"])
    if kind == "image":
        need("PIL", by="images")
        from PIL import Image

        return Image.frombytes(about["mode"], tuple(about["size"]), array.tobytes())
    raise KeyError(kind)


def save_state(store: Storage, name: str, values: Mapping[str, Any]) -> None:
    """Values as NAME.json and NAME.CHECKSUM.npz; CheckpointError for what cannot be saved, StorageError."""
    writer = _Writer()
    saved = writer.value(dict(values), "state")
    files = io.BytesIO()
    np.savez(files, **writer.arrays)  # none of them holds objects, which would be pickled
    checksum = xxhash.xxh3_64_hexdigest(files.getbuffer())
    key = f"{name}.{checksum}.npz"
    store.write(key, files.getvalue())
    described = {"version": VERSION, "arrays": key, "xxh3_64": checksum, "values": saved}
    store.write(f"{name}.json", json.dumps(described).encode())
    for each in store.list_objects(f"{name}."):
        if each.key.endswith(".npz") and each.key != key:
            store.delete(each.key)


def load_state(store: Storage, name: str) -> dict[str, Any]:
    """What save_state was given; CheckpointError where it is damaged, ObjectMissingError where it is not there."""
    where = f"{store.url}/{name}.json"
    text = store.read(f"{name}.json")
    try:
        described = json.loads(text)
        if described["version"] != VERSION:
            raise CheckpointError(
                f"{where} has version {described['version']!r}, expected {VERSION}: load it with the version of "
                "lmms_stream that saved it"
            )
        data = store.read(described["arrays"])
        if xxhash.xxh3_64_hexdigest(data) != described["xxh3_64"]:
            raise CheckpointError(f"{described['arrays']} is not what {where} was saved with: take an earlier state")
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            values: dict[str, Any] = _restored(described["values"], {each: arrays[each] for each in arrays})
    except ObjectMissingError as error:
        raise CheckpointError(f"{where} names a file that is not there ({error}): take an earlier state") from error
    except LmmsStreamError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{where} is no saved state ({error!r}): take an earlier one") from error
    return values
