"""What is generated and rewarded: a prompt, and later its response. The fields are Relax's."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any


@dataclass
class Sample:
    """One prompt and one response to it. Other attributes may be set on it; copies and saved states keep them.

    group_index: of the samples that share a prompt; index: its own; both count up over the whole run. prompt: a text,
    or messages. tokens: of prompt and response. multimodal_inputs: the prompt's media, shared by copies.
    label: what a rule compares the response with. metadata: the row's, with its tools. remove_sample: leave it out of
    the loss. abort_count: how often its generation was broken off.
    """

    group_index: int | None = None
    index: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[Any] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    abort_count: int = 0

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None

    @staticmethod
    def of(prompt: Any, label: Any, metadata: dict[str, Any], media: dict[str, Any] | None = None) -> Sample:
        """A sample of a prompt, as Sample(prompt=…, label=…, metadata=…, multimodal_inputs=…), in half of the time.

        Other fields have their defaults as every class has them, so `vars` does not tell them.
        """
        made = Sample.__new__(Sample)
        made.prompt = prompt
        made.tokens = []
        made.multimodal_inputs = media
        made.label = label
        made.weight_versions = []
        made.metadata = metadata
        return made

    def copy(self) -> Sample:
        """Another sample with the same values, which can be changed without this one; media are shared."""
        made = Sample()
        for name, value in vars(self).items():
            shared = name in _SHARED or isinstance(value, _UNCHANGING)
            setattr(made, name, value if shared else copy.deepcopy(value))
        return made

    def to_dict(self) -> dict[str, Any]:
        known = {each.name: getattr(self, each.name) for each in fields(Sample)}
        return {**known, **vars(self), "status": self.status.value}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Sample:
        names = {each.name for each in fields(Sample)}
        known = {name: value for name, value in values.items() if name in names}
        if "status" in known:
            known["status"] = Sample.Status(known["status"])
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


_SHARED = {"multimodal_inputs", "multimodal_train_inputs"}
_UNCHANGING = (str, int, float, bytes, type(None), Enum)
