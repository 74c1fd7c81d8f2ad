"""Has a model run on parts of the tokens of packs, where ranks share them."""

from __future__ import annotations

from ...errors import ConfigError
from ..run.mesh import Meshes
from .model import PackedModel
from .plain import PlainModel
from .sequence import SequenceParts, check_parts
from .ulysses import register


def share_tokens(model: PackedModel | PlainModel, meshes: Meshes) -> None:
    """Have a model run on parts of the tokens, where there are ranks that share them.

    ConfigError for a model that cannot.
    """
    if (mesh := meshes.sp) is None:
        return
    if isinstance(model, PlainModel):
        raise ConfigError(
            f"train.sequence_parallel {mesh.size()} shares the tokens of texts, and {type(model.model).__name__} is no "
            "language model: set it to 1"
        )
    check_parts(
        model.model,
        degree=mesh.size(),
        matrix_parts=1 if meshes.tp is None else meshes.tp.size(),
        is_of_text=model.family is None,
    )
    register()
    model.sequence = SequenceParts(group=mesh.get_group())
