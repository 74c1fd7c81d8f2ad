"""What a checkpoint says of the run that wrote it, and how another run differs from it. Plain JSON values."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError

from ...errors import CheckpointError
from ...version import VERSION
from ..model.adapters import adapter_of
from ..model.plain import config_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..run.settings import TrainConfig

# Fields of a model's config that may change when a run resumes.
_NOT_THE_MODEL = {"transformers_version", "_name_or_path", "use_cache", "_attn_implementation"}
# Of an adapter's config; where its base lies may change, what it is may not.
_NOT_THE_ADAPTER = {"peft_version", "base_model_name_or_path", "revision", "inference_mode"}
_NOT_COMPARED = {"output_dir", "checkpoint_dir", "resume"}  # they change no result


def fingerprint_of(model: PreTrainedModel, settings: TrainConfig) -> dict[str, Any]:
    """Versions of the code, the model's config, its adapter, and the run's settings.

    The plans of the data are in the cursor.
    """
    import torch
    import transformers

    versions = {"lmms_stream": VERSION, "torch": str(torch.__version__), "transformers": transformers.__version__}
    described = {
        "versions": versions,
        "model": config_of(model) | {"architectures": [type(model).__name__]},
        "train": dataclasses.asdict(settings),
    }
    if (adapter := adapter_of(model)) is not None:
        described["adapter"] = {"config": adapter.config, "base": adapter.base}
    plain: dict[str, Any] = json.loads(json.dumps(described, default=str))
    return plain


def check_same_model(saved: Mapping[str, Any], now: Mapping[str, Any], *, where: str) -> None:
    """CheckpointError, with the names and values, where the model's config differs in what both versions know.

    Also where its adapter does, or the weights under it.
    """
    before_model = saved["model"]
    if saved["versions"].get("transformers") != now["versions"].get("transformers"):
        before_model = _as_read_now(before_model)
    differing = _differing(before_model, now["model"], but=_NOT_THE_MODEL)
    before, after = saved.get("adapter"), now.get("adapter")
    if (before is None) != (after is None):
        differing.append("all of it, now an adapter" if before is None else "an adapter, now all of it")
    elif before is not None and after is not None:
        differing += _differing(before["config"], after["config"], but=_NOT_THE_ADAPTER)
        if before["base"] != after["base"]:
            differing.append(f"weights under its adapter with digest {before['base']}, now {after['base']}")
    if differing:
        raise CheckpointError(
            f"checkpoint {where} is of another model ({'; '.join(differing)}): "
            "restore the model settings, or start over in another output_dir"
        )


def _as_read_now(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A model's config of another version of transformers, as the installed version reads it; unsaid values are left
    out, as versions differ in what they say of themselves."""
    from transformers import AutoConfig

    try:
        read = AutoConfig.for_model(**config).to_dict()
    except (TypeError, ValueError, LookupError, AttributeError, StrictDataclassError):  # of no class of transformers'
        read = {**config}
    plain: dict[str, Any] = json.loads(json.dumps(read, default=str))
    return {name: value for name, value in plain.items() if value is not None}


def _differing(saved: Mapping[str, Any], now: Mapping[str, Any], *, but: Set[str]) -> list[str]:
    common = sorted((saved.keys() & now.keys()) - but)
    return [f"{name} {saved[name]!r}, now {now[name]!r}" for name in common if saved[name] != now[name]]


def other_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Settings and versions that differ from the checkpoint's, in words; a run may go on with them.

    A setting that the checkpoint's version did not have was as its default is now.
    """
    before = {"train": _defaults() | saved["train"], "versions": saved["versions"]}
    return [
        f"{part}.{name} was {before[part].get(name)!r}, is {now[part].get(name)!r}"
        for part in ("train", "versions")
        for name in sorted(before[part].keys() | now[part].keys())
        if before[part].get(name) != now[part].get(name) and name not in _NOT_COMPARED
    ]


def _defaults() -> dict[str, Any]:
    """The settings that have a default, as a checkpoint would hold them."""
    from ..run.settings import TrainConfig

    made = dataclasses.asdict(TrainConfig(output_dir="", global_batch=1, max_steps=1))
    plain: dict[str, Any] = json.loads(json.dumps(made, default=str))
    return {name: value for name, value in plain.items() if name not in {"output_dir", "global_batch", "max_steps"}}
