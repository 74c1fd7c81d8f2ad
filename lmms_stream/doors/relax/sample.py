"""Sample: a prompt to generate a response for and to reward. The fields are Relax's."""

from __future__ import annotations

import copy
import io
import json
import sys
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...errors import CheckpointError, DataError, LmmsStreamError, ObjectMissingError
from ...extras import need
from ...storage.storage import Storage


@dataclass
class Speculation:
    """Counts of speculative decoding over all parts of a response."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        return self.spec_accept_token_num / max(self.spec_draft_token_num, 1)

    @property
    def spec_accept_length(self) -> float:
        return self.completion_token_num / max(self.spec_verify_ct, 1)

    def add(self, meta_info: Mapping[str, Any]) -> None:
        for name in ("spec_accept_token_num", "spec_draft_token_num", "spec_verify_ct"):
            setattr(self, name, getattr(self, name) + meta_info.get(name, 0))
        self.completion_token_num += meta_info.get("completion_tokens", 0)

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, int]) -> Speculation:
        return cls(**data)


@dataclass
class PrefixCache:
    """Counts of prompt tokens, and of prompt tokens found in an engine's cache."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        return self.cached_tokens / max(self.total_prompt_tokens, 1)

    def add(self, meta_info: Mapping[str, Any]) -> None:
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, int]) -> PrefixCache:
        return cls(**data)


@dataclass
class Sample:
    """One prompt and its response. Other attributes may be set; copies and saved states keep them.

    group_index: number shared by the samples of a prompt; index: the sample's own number; both count up over the whole
    run. prompt: a text or messages. tokens: tokens of prompt and response. multimodal_inputs: the prompt's media,
    shared by copies.
    label: reference for a rule-based reward. metadata: the row's metadata, with its tools. remove_sample: leave the
    sample out of the loss. abort_count: number of aborted generations. rollout_*: values of the generating engine.
    teacher_*, student_*, opd_*: values of distillation; only teacher_multimodal_inputs is set here.
    """

    group_index: int | None = None
    index: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    rollout_tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    custom_advantage: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[Any] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_log_probs_mask: list[bool] | None = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    abort_count: int = 0

    teacher_log_probs: list[float] | None = None
    student_topk_token_ids: Any = None
    student_topk_log_probs: Any = None
    teacher_at_student_topk_log_probs: Any = None
    teacher_topk_token_ids: Any = None
    teacher_topk_log_probs: Any = None
    student_at_teacher_topk_log_probs: Any = None
    opd_topk_token_ids: Any = None
    opd_topk_student_log_probs: Any = None
    opd_topk_teacher_log_probs: Any = None
    opd_topk_ksz: Any = None
    teacher_prompt: str | list[dict[str, Any]] | None = None
    teacher_multimodal_inputs: dict[str, Any] | None = None
    teacher_tokens: list[int] | None = None
    teacher_prompt_length: int | None = None
    teacher_image_data: dict[str, Any] | None = None
    teacher_image_b64_list: list[str] | None = None
    teacher_image_grid_thw: Any = None

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    SpecInfo: ClassVar[type[Speculation]] = Speculation
    PrefixCacheInfo: ClassVar[type[PrefixCache]] = PrefixCache
    spec_info: Speculation = field(default_factory=Speculation)
    prefix_cache_info: PrefixCache = field(default_factory=PrefixCache)

    @staticmethod
    def of(
        prompt: Any,
        label: Any,
        metadata: dict[str, Any],
        media: dict[str, Any] | None = None,
        teacher_media: dict[str, Any] | None = None,
    ) -> Sample:
        """Return Sample(prompt=…, label=…, metadata=…, multimodal_inputs=…), built faster than by the constructor.

        Other fields use class defaults or are created on first access, so `vars` does not contain them.
        """
        made = Sample.__new__(Sample)
        made.prompt = prompt
        made.tokens = []
        made.multimodal_inputs = media
        made.label = label
        made.weight_versions = []
        made.metadata = metadata
        if teacher_media is not None:
            made.teacher_multimodal_inputs = teacher_media
        return made

    def __getattr__(self, name: str) -> Any:
        """Return the default of a field left out by `of`."""
        if name not in _MADE_WHEN_ASKED:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = _MADE_WHEN_ASKED[name]()
        setattr(self, name, value)
        return value

    def copy(self) -> Sample:
        """Return an independent sample with the same values; only media are shared."""
        made = Sample.__new__(Sample)
        values = made.__dict__
        values.update(_DEFAULTS)
        for name, value in vars(self).items():
            if name in _SHARED or isinstance(value, _UNCHANGING):
                values[name] = value
            else:
                values[name] = copy.deepcopy(value) if value or type(value) not in (list, dict) else type(value)()
        return made

    def to_dict(self) -> dict[str, Any]:
        known = {each.name: getattr(self, each.name) for each in fields(Sample)}
        infos = {name: getattr(self, name).to_dict() for name in _INFOS}
        return {**known, **vars(self), **infos, "status": self.status.value}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Sample:
        names = {each.name for each in fields(Sample)}
        known = {name: value for name, value in values.items() if name in names}
        if "status" in known:
            known["status"] = Sample.Status(known["status"])
        for name in known.keys() & _INFOS.keys():
            known[name] = _INFOS[name].from_dict(known[name])
        sample = Sample(**known)
        for name in values.keys() - names:
            setattr(sample, name, values[name])
        return sample

    def get_reward_value(self, args: Any) -> Any:
        """Return the reward; of several rewards, the one named by args.reward_key."""
        key = getattr(args, "reward_key", None)
        return self.reward[key] if key and isinstance(self.reward, dict) else self.reward

    @property
    def effective_response_length(self) -> int:
        """Tokens of the response that count in the loss."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def update_from_meta_info(self, args: Any, meta_info: Mapping[str, Any]) -> None:
        """Record SGLang's report of a generation: counts, the version of the weights, and the finish reason.

        DataError for a finish reason other than stop, length and abort.
        """
        ended = meta_info.get("finish_reason")
        status = _STATUS_OF.get(str(ended.get("type"))) if isinstance(ended, Mapping) else None
        if status is None:
            raise DataError(
                f"finish_reason is {ended!r}, expected {{'type': …}} of {', '.join(_STATUS_OF)}: set sample.status by "
                "yourself"
            )
        if getattr(args, "sglang_speculative_algorithm", None):
            self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        if "weight_version" in meta_info:
            self.weight_versions.append(meta_info["weight_version"])
        self.status = status


_STATUS_OF = {
    "stop": Sample.Status.COMPLETED,
    "length": Sample.Status.TRUNCATED,
    "abort": Sample.Status.ABORTED,
}
_INFOS: dict[str, Any] = {"spec_info": Speculation, "prefix_cache_info": PrefixCache}
_MADE_WHEN_ASKED: dict[str, Any] = {"rollout_tokens": list, **_INFOS}
_DEFAULTS = {each.name: each.default for each in fields(Sample) if each.default is not MISSING}
_SHARED = {"multimodal_inputs", "multimodal_train_inputs", "teacher_multimodal_inputs"}
_UNCHANGING = (str, int, float, bytes, type(None), Enum)


# Values of samples and counts as a JSON file and a file of arrays next to it, written atomically. No pickles. The
# arrays are written first, under a name with their checksum; the JSON file, which names them, is written last. A killed
# writer leaves the old state or the new state.

VERSION = 1
_KIND = "__kind__"  # marks a JSON object that encodes another type


class _Writer:
    """Encode values as JSON values, and values without a JSON form as arrays, each stored once."""

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}  # for np.savez, whose own arguments have other types
        self._names: dict[int, str] = {}
        self._held: list[Any] = []  # kept alive to prevent reuse of their ids

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
                "dicts, bytes, arrays, dense tensors or PIL's images (RGB, RGBA, L), or leave it out of groups"
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
    if torch is not None and isinstance(value, torch.Tensor) and value.layout is torch.strided:
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

        made = torch.empty(about["shape"], dtype=getattr(torch, about["dtype"]))
        if made.numel():  # torch gives no other view of an empty tensor
            made.reshape(-1).view(torch.uint8).copy_(torch.from_numpy(array.copy()))
        return made
    if kind == "image":
        need("PIL", by="images")
        from PIL import Image

        return Image.frombytes(about["mode"], tuple(about["size"]), array.tobytes())
    raise KeyError(kind)


def save_state(store: Storage, name: str, values: Mapping[str, Any]) -> None:
    """Write values as NAME.json and NAME.CHECKSUM.npz. CheckpointError for an unsupported value, StorageError."""
    writer = _Writer()
    saved = writer.value(dict(values), "state")
    files = io.BytesIO()
    np.savez(files, **writer.arrays)  # no object arrays, which would be pickled
    checksum = xxhash.xxh3_64_hexdigest(files.getbuffer())
    key = f"{name}.{checksum}.npz"
    store.write(key, files.getvalue())
    described = {"version": VERSION, "arrays": key, "xxh3_64": checksum, "values": saved}
    store.write(f"{name}.json", json.dumps(described).encode())
    for each in store.list_objects(f"{name}."):
        if each.key.endswith(".npz") and each.key != key:
            store.delete(each.key)


def load_state(store: Storage, name: str) -> dict[str, Any]:
    """Return the values of save_state; CheckpointError for a damaged state, ObjectMissingError for a missing state."""
    where = f"{store.url}/{name}.json"
    text = store.read(f"{name}.json")
    try:
        described = json.loads(text)
        if described["version"] != VERSION:
            raise CheckpointError(
                f"{where} has version {described['version']!r}, expected {VERSION}: load it with the lmms_stream "
                "version of the saved run"
            )
        data = store.read(described["arrays"])
        if xxhash.xxh3_64_hexdigest(data) != described["xxh3_64"]:
            raise CheckpointError(f"{described['arrays']} is not what {where} was saved with: take an earlier state")
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            values: dict[str, Any] = _restored(described["values"], {each: arrays[each] for each in arrays})
    except ObjectMissingError as error:
        raise CheckpointError(f"{where} names a missing file ({error}): load an earlier state") from error
    except LmmsStreamError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{where} is not a saved state ({error!r}): load an earlier state") from error
    return values
