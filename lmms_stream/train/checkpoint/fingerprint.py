"""What a checkpoint says of the run that wrote it, and how another run differs from it. Plain JSON values."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError
from ...version import VERSION

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..run.settings import TrainConfig

# Fields of a model's config that may change when a run resumes.
_NOT_THE_MODEL = {"transformers_version", "_name_or_path", "use_cache", "_attn_implementation"}
_NOT_COMPARED = {"output_dir", "checkpoint_dir", "resume"}  # they change no result


def fingerprint_of(model: PreTrainedModel, settings: TrainConfig) -> dict[str, Any]:
    """Versions of the code, the model's config, and the run's settings. The plans of the data are in the cursor."""
    import torch
    import transformers

    versions = {"lmms_stream": VERSION, "torch": str(torch.__version__), "transformers": transformers.__version__}
    described = {
        "versions": versions,
        "model": model.config.to_dict() | {"architectures": [type(model).__name__]},
        "train": dataclasses.asdict(settings),
    }
    plain: dict[str, Any] = json.loads(json.dumps(described, default=str))
    return plain


def check_same_model(saved: Mapping[str, Any], now: Mapping[str, Any], *, where: str) -> None:
    """CheckpointError, with the names and values, where the model's config differs in what both versions know."""
    common = (saved["model"].keys() & now["model"].keys()) - _NOT_THE_MODEL
    differing = [
        f"{name} {saved['model'][name]!r}, now {now['model'][name]!r}"
        for name in sorted(common)
        if saved["model"][name] != now["model"][name]
    ]
    if differing:
        raise CheckpointError(
            f"checkpoint {where} is of another model ({'; '.join(differing)}): "
            "restore the model settings, or start over in another output_dir"
        )


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
