"""Masked diffusion language modelling (LLaDA, Nie et al. 2025, arXiv 2502.09992): masked tokens -> the original tokens.

For each sequence a probability p is drawn, and each of its loss tokens is masked with probability p. The model, in
which a token sees all of its sequence, predicts the masked tokens. A masked token's cross entropy has the weight 1 / p:
the sum over a sequence is, in expectation, an upper bound of minus the log of the sequence's probability.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import ConfigError
from ...loader.collate import collate, join
from ...processors.base import IGNORED_LABEL
from ...processors.tokenizers import FastTokenizer
from ...train.model.model import PackedModel
from ...train.tasks.causal import ROUTER, TOKENS, CausalLanguageModelling
from ...train.tasks.task import Draw, LossSum
from ...types import Batch, Processed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "masked_diffusion"


def collate_whole(samples: Sequence[Processed], sample_ids: Sequence[int], **options: Any) -> Batch:
    """See collate; the first token of a sample is a loss token if its labels include it, because no other token
    predicts it.
    """
    batch = collate(samples, sample_ids, **options)
    if not samples:
        return batch
    said = np.concatenate([sample["labels"] for sample in samples])
    starts = batch.cu_seqlens[: batch.num_segments].numpy()
    batch.labels[0, starts] = torch.from_numpy(said[starts].astype(np.int64))
    return replace(batch, num_loss_tokens=int((batch.labels != IGNORED_LABEL).sum()))


class MaskedPack(NamedTuple):
    """A pack with masks. pack: input of the model; its labels are of masked tokens. weights: float32[masked tokens], 1
    / p of each.
    """

    pack: Batch
    weights: NDArray[np.float32]


class MaskedDiffusion(CausalLanguageModelling):
    """Cross entropy of masked tokens times 1 / p, over the loss tokens of the global batch, masked or not.

    p_min, p_max: bounds of the probability p, which is drawn uniformly between them for each sequence. mask_token_id:
    the token that replaces masked tokens (default: the model's mask_token_id, then the tokenizer's mask token, then the
    first row of the embedding after the tokenizer's tokens).

    Masks follow from the seed of the run, the step and the sample; an evaluation draws the same masks each time.
    """

    name = NAME
    collate: Callable[..., Batch] = staticmethod(collate_whole)

    def __init__(self, *, p_min: float = 0.01, p_max: float = 0.99, mask_token_id: int | None = None):
        super().__init__()
        if not 0 < p_min <= p_max <= 1:
            raise ConfigError(
                f"p_min {p_min!r} and p_max {p_max!r} of task {NAME} bound a probability, 0 < p_min <= p_max <= 1: "
                "correct them"
            )
        self.p_min, self.p_max, self.mask_token_id = p_min, p_max, mask_token_id

    def packed_model(self, model: PreTrainedModel, family: Any) -> MaskedModel:
        """See Task."""
        if family is not None:
            raise ConfigError(f"task {NAME} learns from texts, and these samples have media: take a processor of text")
        return MaskedModel(model, mask_token_id=self.mask_token_id)

    def losses(
        self, model: PackedModel, batch: Batch, packs: Sequence[Batch], draw: Draw | None = None
    ) -> Mapping[str, LossSum]:
        """Return the losses. draw: source of random draws; required."""
        assert draw is not None
        assert isinstance(model, MaskedModel)
        masked = [self.mask(pack, draw, token_id=model.token_id) for pack in packs]
        device = batch.input_ids.device
        hidden = [each.pack for each in masked]
        made = model(join(hidden).to(device), hidden)
        weights = torch.from_numpy(np.concatenate([each.weights for each in masked])).to(device)
        sums = {TOKENS: LossSum.of(made.tokens * weights, [len(each.weights) for each in masked])}
        if made.router is not None:
            sums[ROUTER] = LossSum(made.router, torch.empty(0))
        return sums

    def check(self, model: PackedModel, *, device: torch.device, bf16: bool, is_compiled: bool) -> None:
        if model.sequence is not None:
            raise ConfigError(
                f"train.sequence_parallel is only for causal models, and task {NAME} has no causal model: set it to 1"
            )
        assert isinstance(model, MaskedModel)
        _ = model.token_id
        super().check(model, device=device, bf16=bf16, is_compiled=is_compiled)

    def mask(self, pack: Batch, draw: Draw, *, token_id: int) -> MaskedPack:
        """Mask a pack on the CPU.

        Pieces of one sample have different masks: their tokens are part of the random key.
        """
        ids = pack.input_ids.numpy().copy()
        labels = pack.labels.numpy().copy()
        weights = np.zeros(pack.num_tokens, np.float32)
        bounds = pack.cu_seqlens[: pack.num_segments + 1].tolist()
        for segment, (start, stop) in enumerate(pairwise(bounds)):
            digest = zlib.crc32(ids[0, start:stop].tobytes())
            sample_id, repeat = pack.sample_of(segment), pack.repeat_of(segment)
            rng = draw.generator(pack.source, sample_id, f"mask {digest}", repeat=repeat)
            p = self.p_min + (self.p_max - self.p_min) * rng.random()
            is_masked = (rng.random(stop - start) < p) & (labels[0, start:stop] != IGNORED_LABEL)
            weights[start:stop][is_masked] = 1 / p
        ids[0, weights > 0] = token_id
        labels[0, weights == 0] = IGNORED_LABEL
        hidden = replace(
            pack,
            input_ids=torch.from_numpy(ids),
            labels=torch.from_numpy(labels),
            num_loss_tokens=int(np.count_nonzero(weights)),
        )
        return MaskedPack(hidden, weights[weights > 0])


class MaskedModel(PackedModel):
    """A PackedModel in which each token sees all of its sequence, and predicts itself.

    mask_token_id: see MaskedDiffusion.
    """

    is_causal = False

    def __init__(self, model: PreTrainedModel, *, mask_token_id: int | None = None):
        super().__init__(model)
        config: Any = self.model.config
        modules: list[Any] = [*self.model.modules()]
        attentions = [each for each in modules if isinstance(getattr(each, "is_causal", None), bool)]
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if not attentions or kinds != {"full_attention"} or getattr(config, "sliding_window", None):
            raise ConfigError(
                f"task {NAME} needs a model whose layers can see the whole sample, and {type(self.model).__name__} has "
                "other layers: use a model with full attention, such as Qwen3 without sliding_window"
            )
        for each in attentions:
            each.is_causal = False
        config.is_causal = False  # exported with the model, for transformers' masks
        self._mask_token_id = mask_token_id if mask_token_id is not None else getattr(config, "mask_token_id", None)
        if self._mask_token_id is not None:
            self._take(int(self._mask_token_id), "mask_token_id")

    @property
    def token_id(self) -> int:
        """Id of the token that replaces masked tokens; ConfigError if it is not known."""
        if self._mask_token_id is None:
            raise ConfigError(
                f"task {NAME} has no mask token, and samples of token ids do not name one: set mask_token_id"
            )
        return int(self._mask_token_id)

    def check_processor(self, processor: Any) -> None:
        """See PackedModel; the first tokenizer determines the mask token if nothing else does."""
        super().check_processor(processor)
        tokenizer = getattr(processor, "tokenizer", None)
        if self._mask_token_id is None and isinstance(tokenizer, FastTokenizer):
            said = tokenizer.special_tokens.get("mask_token")
            found = tokenizer.token_id(said) if said else None
            self._take(tokenizer.num_ids if found is None else found, f"the mask token of tokenizer {tokenizer.name}")

    def _take(self, token_id: int, source: str) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise ConfigError(
                f"{source} would be token {token_id}, and the model has {self.vocab_size}: resize its embedding, or "
                f"give task {NAME} the mask_token_id of a token that no text has"
            )
        self._mask_token_id = self.model.config.mask_token_id = token_id  # exported with the model
