"""What differs between the versions of transformers, each with the version that ends it. Nothing is imported."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

_INSTALLED = tuple(int(part) for part in version("transformers").split(".")[:2])

# Until 5.0: Qwen3-Omni's processor cuts sounds at the chunk_length of its folder; since then it reads them whole.
CUTS_SOUNDS_OF_QWEN3_OMNI = _INSTALLED < (5, 0)

# Until 5.0: settings in files of their own come before those nested in processor_config.json; since then after them.
NESTED_SETTINGS_COME_FIRST = _INSTALLED >= (5, 0)

# Until 5.18: Qwen2.5-VL's model cuts the seconds of a pair of frames to a whole number before it counts positions.
CUTS_SECONDS_OF_FRAMES = _INSTALLED < (5, 18)

# Until 5.9: sdpa and eager get no mask in Qwen3-Omni's tower of sound, so clips see one another.
MIXES_CLIPS_OF_QWEN3_OMNI = _INSTALLED < (5, 9)


def checkpoint_activations(model: Any) -> None:
    """Have a model's blocks run again in the backward pass. Until 5.23 the method has another name."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


@contextmanager
def attention_is_ours() -> Iterator[None]:
    """Inside, models may be given an attention with "sdpa" in its name that is ours.

    Since 5.0 transformers refuses these names for classes that its own sdpa is not for, such as gpt-oss.
    """
    from transformers import PreTrainedModel

    kept = PreTrainedModel._sdpa_can_dispatch
    PreTrainedModel._sdpa_can_dispatch = lambda self, is_init_check=False: True
    try:
        yield
    finally:
        PreTrainedModel._sdpa_can_dispatch = kept


# Names of arguments: until 5.23, and since then.
_RENAMED = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}


def as_installed(said: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Arguments of any version by the names of the installed one. names: of its TrainingArguments.

    Since 5.0 a share of the run is said by warmup_steps, which was warmup_ratio. Other values stay as they are.
    """
    values = dict(said)
    for old, new in _RENAMED.items():
        other, known = (old, new) if new in names else (new, old)
        if other in values:
            values.setdefault(known, values.pop(other))
    if "warmup_ratio" in values and "warmup_ratio" not in names:
        ratio = values.pop("warmup_ratio")
        values["warmup_steps"] = values.get("warmup_steps") or ratio
    return values
