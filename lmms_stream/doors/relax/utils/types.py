"""Relax's types of samples and media."""

from __future__ import annotations

from dataclasses import dataclass

from ..prompts import KINDS
from ..sample import Sample
from . import refused_names

__all__ = ["MultimodalType", "MultimodalTypes", "Sample"]


@dataclass(frozen=True)
class MultimodalType:
    """A kind of media and its placeholder in prompts."""

    name: str
    placeholder: str


class MultimodalTypes:
    IMAGE, VIDEO, AUDIO = (MultimodalType(kind, f"<{kind}>") for kind in KINDS)

    @classmethod
    def all(cls) -> list[MultimodalType]:
        return [cls.IMAGE, cls.VIDEO, cls.AUDIO]

    @classmethod
    def get(cls, name: str) -> MultimodalType | None:
        return next((each for each in cls.all() if each.name == name), None)


__getattr__ = refused_names(
    __name__,
    dict.fromkeys(("ParamInfo", "RolloutBatch", "SFTBatch"), "it belongs to Relax's training, which stays Relax's"),
)
