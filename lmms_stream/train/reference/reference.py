"""What a reference is, and the digest of weights by which it is known again."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.tensor import DTensor

from ...errors import ConfigError
from ..model.adapters import adapter_of
from ..model.log_probs import OfPacks, Passes
from ..model.model import PackedModel
from ..run.distributed import cpu_group

ReferenceKind = Literal["model", "stored"]


class Reference(Protocol):
    """The starting weights of a run, as far as a task compares with them. All ranks make the same calls.

    digest: of those weights.
    """

    @property
    def digest(self) -> str: ...

    def log_probs(self, passes: Passes) -> OfPacks:
        """Of each pack, those of its sequences, on any device."""
        ...


def weights_digest(model: PackedModel) -> str:
    """xxh3 of the names, types and numbers of a sharded model's weights, the same for any number of ranks.

    Of a model with an adapter: of the weights under it, which are its reference. All ranks call it; each weight is
    gathered, one after another.
    """
    if (adapter := adapter_of(model.model)) is not None:
        return adapter.base
    digest = xxhash.xxh3_64()
    for name, parameter in model.model.named_parameters():
        value = parameter.detach()
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if dist.get_rank() == 0:
            digest.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
            values: Any = whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            digest.update(values)
    told = [digest.hexdigest()]
    dist.broadcast_object_list(told, src=0, group=cpu_group())
    return told[0]


def check_adapter(model: PackedModel) -> None:
    """ConfigError for an adapter that begins otherwise than without effect, so that its base is no reference."""
    adapter = adapter_of(model.model)
    begins = True if adapter is None else adapter.config.get("init_lora_weights", True)
    if begins not in (True, "gaussian"):
        raise ConfigError(
            f"the adapter's init_lora_weights {begins!r} changes the weights under it or what they make, and these are "
            "the reference: leave it out"
        )
