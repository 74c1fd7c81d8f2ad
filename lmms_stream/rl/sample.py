"""What is generated and rewarded: a prompt, and later its response. The fields are Relax's."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar

from ..errors import DataError


@dataclass
class Speculation:
    """Counts of speculative decoding, over all parts of a response."""

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
    """Counts of the tokens of prompts, and of those that an engine had in its cache."""

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
    """One prompt and one response to it. Other attributes may be set on it; copies and saved states keep them.

    group_index: of the samples that share a prompt; index: its own; both count up over the whole run. prompt: a text,
    or messages. tokens: of prompt and response. multimodal_inputs: the prompt's media, shared by copies.
    label: what a rule compares the response with. metadata: the row's, with its tools. remove_sample: leave it out of
    the loss. abort_count: how often its generation was broken off. rollout_*: of the engine that generated. teacher_*,
    student_*, opd_*: of distillation; nothing here sets them but teacher_multimodal_inputs.
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
        """A sample of a prompt, as Sample(prompt=…, label=…, metadata=…, multimodal_inputs=…), in a part of the time.

        Other fields have their defaults as every class has them, or once they are asked for, so `vars` does not tell
        them.
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
        """The default of a field that `of` has left out."""
        if name not in _MADE_WHEN_ASKED:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = _MADE_WHEN_ASKED[name]()
        setattr(self, name, value)
        return value

    def copy(self) -> Sample:
        """Another sample with the same values, which can be changed without this one; media are shared."""
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
        """The reward, or where it is several the one that args.reward_key names."""
        key = getattr(args, "reward_key", None)
        return self.reward[key] if key and isinstance(self.reward, dict) else self.reward

    @property
    def effective_response_length(self) -> int:
        """Tokens of the response that count in the loss."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def update_from_meta_info(self, args: Any, meta_info: Mapping[str, Any]) -> None:
        """Take what SGLang tells of a generation: counts, the version of the weights, and why it has ended.

        Raises DataError for an end of another type than stop, length and abort.
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
