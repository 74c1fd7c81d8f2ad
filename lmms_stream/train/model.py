"""Models from transformers, ready to be sharded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..errors import ConfigError
from .loss import token_losses

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """One of: pretrained, a local folder or hub id; config, the fields of a transformers config.

    config holds `model_type` and whatever that config class takes; the model starts from random weights.
    """

    pretrained: str | None = None
    config: Mapping[str, Any] | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Literal["sdpa", "eager"] = "sdpa"
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.pretrained is None) == (self.config is None):
            raise ConfigError("model needs exactly one of pretrained and config")

    def build(self) -> PreTrainedModel:
        """The causal language model, on the CPU; the same weights on every rank."""
        import transformers

        torch.manual_seed(self.seed)
        options = {"attn_implementation": self.attention, "dtype": getattr(torch, self.dtype)}
        try:
            if self.pretrained is not None:
                return transformers.AutoModelForCausalLM.from_pretrained(self.pretrained, **options)
            fields = dict(self.config or {})
            config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
            model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config, **options)
            return model
        except (KeyError, ValueError, OSError, TypeError) as error:
            raise ConfigError(f"model cannot be built: {' '.join(str(error).split())}") from error


class PackedModel(torch.nn.Module):
    """A transformers model with its loss on packs: what FSDP shards as a whole.

    The head is applied to the tokens that are learnt alone, so it is called here and not by the model.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See token_losses. input_ids, position_ids, labels: int64[1, T].

        transformers keeps the segments apart where position_ids restart, but only without an attention mask and
        without a cache.
        """
        output = self.model.base_model(
            input_ids=input_ids, position_ids=position_ids, attention_mask=None, use_cache=False
        )
        head = self.model.get_output_embeddings()
        return token_losses(output.last_hidden_state, labels, head, vocab_size=head.weight.shape[0])


def blocks_to_shard(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated blocks of a transformers model, which are sharded one by one."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]
