"""TRL's names, with its trainers replaced: `from trl import …` becomes `from lmms_stream.trl import …`.

trainers        SFTTrainer, DPOTrainer and KTOTrainer, with TRL's arguments in TRL's order

Every other name is TRL's own, except unsupported trainers, which are refused by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from ...extras import need
from ...lazy import lazy_names

if TYPE_CHECKING:
    from .trainers import DPOTrainer as DPOTrainer
    from .trainers import KTOTrainer as KTOTrainer
    from .trainers import SFTTrainer as SFTTrainer

_HOME = {"DPOTrainer": "trainers", "KTOTrainer": "trainers", "SFTTrainer": "trainers"}

__all__ = [*_HOME]

_ours, __dir__ = lazy_names(__name__, _HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return _ours(name)
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name.endswith("Trainer"):
        raise ConfigError(
            f"{name} is not part of lmms_stream.trl, which has {', '.join(_HOME)}: import it from trl, which trains "
            "without packs"
        )
    return getattr(need("trl", by=f"lmms_stream.trl.{name}"), name)
