"""Models from transformers as they are run on packs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch

from ...errors import ConfigError
from ...loader.collate import joined_bounds
from ...processors.base import Processor
from ...processors.families.family import Family, towers_of
from ...processors.tokenizers import FastTokenizer
from ...types import Batch
from ...versions.transformers import masks_of_packs, name_missing_output
from .adapters import run_module, take_adapter
from .attention import SDPA_VARLEN, VARLEN, has_axes
from .build import check_config
from .by_sample import BySample, PackSamples
from .loss import (
    Head,
    SharedParameters,
    decoder_of,
    learnt_tokens,
    losses_of_logits,
    router_loss,
    router_weight,
    run_to_hidden,
    token_losses,
)
from .towers import Dummies, has_modules, model_inputs, parts_of, positions_along_axes, without_bounds_of_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LogitsWay = Literal["chunks", "kept", "whole"]
LogitsOf = Callable[[slice], torch.Tensor]  # tokens of a batch -> their logits, float[n, V]


class PackLosses(NamedTuple):
    """The loss of each target in order, and the logsumexp of its logits: float32[num_loss_tokens] each.

    router: the sum over packs of their tokens times the auxiliary loss of their experts, without its weight; None where
    the model has none, and outside of training.
    """

    tokens: torch.Tensor
    logs: torch.Tensor
    router: torch.Tensor | None


class TokenParts(Protocol):
    """The tokens of a pack in equal parts, one for each rank of a group: see plugins/parallel/sequence.py."""

    @property
    def degree(self) -> int:
        """Number of ranks in the group."""

    def own(self, inputs: Mapping[str, Any], *, of_tokens: Sequence[str]) -> dict[str, Any]:
        """Return a model's arguments for this rank's part. of_tokens: names of those with a number for each token."""

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the last dimension."""

    def labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the labels of this rank's part and of the token after it: int64[1, n]."""

    def whole(self, part: torch.Tensor, num_tokens: int, *, dim: int = 0) -> torch.Tensor:
        """Return the parts of all ranks, joined, without padding. dim: the dimension of tokens."""

    def whole_losses(
        self,
        losses: torch.Tensor,
        logs: torch.Tensor,
        learnt: torch.Tensor,
        every_learnt: torch.Tensor,
        num_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss and the logsumexp of each target of a pack: float32[num_loss_tokens] each."""

    def leave_out(self, choices: list[str], named: str) -> dict[str, str]:
        """Leave attentions without a mask in `choices`; returns the reason for each other one."""


class PackedModel(torch.nn.Module):
    """A transformers model with its loss on packs: what FSDP shards as a whole.

    logits_way: how the logits that predict a target are computed, always by the model's own forward, so that its
    scales, caps and biases are applied. "chunks": some tokens at a time, from hidden states computed once. "kept": for
    all these tokens at once, by its argument logits_to_keep. "whole": for all tokens. choice.prove_packing finds
    the thriftiest that gives the same losses. family: that of the processors, where any reads media.

    sequence: where it is set, the ranks of a group run the blocks on parts of the tokens; each has the losses, logits
    and router's losses of whole packs, and gradients of its own part.

    by_sample: where it is set, some layers are run on each sample alone. gives_bounds: the model is told where samples
    begin by the arguments that the kernels of recurrent layers take.

    is_causal: whether a token sees only tokens before it, and predicts the next one. A subclass whose tokens see all of
    their sample and predict themselves sets it to False.

    read_logits: where it is set, each forward pass that makes logits of all tokens of a batch at little cost calls it
    with the batch and them, before it ends.
    """

    is_causal = True

    def __init__(self, model: PreTrainedModel, family: Family | None = None):
        super().__init__()
        name_missing_output()
        self.model = model = take_adapter(model)
        check_config(model.config)
        self.family = family
        self._tower_paths = {} if family is None else towers_of(family, partial(parts_of, model))
        self._dummies = Dummies(family) if family is not None else None
        self.read_logits: Callable[[Batch, LogitsOf], None] | None = None
        self.sequence: TokenParts | None = None
        self.by_sample: BySample | None = None
        self.gives_bounds = False
        self.router_weight = router_weight(model)
        self._has_text_axis = has_axes(model.config)
        self.logits_way: LogitsWay = self.logits_ways[0]
        if (prepare := getattr(family, "prepare_model", None)) is not None:
            prepare(self.media_model)
        for path in filter(None, set(self._tower_paths.values())):
            tower = self.media_model.get_submodule(path)
            tower.register_forward_pre_hook(without_bounds_of_text, with_kwargs=True)

    def __getattr__(self, name: str) -> Any:
        """Parameters and modules of its own; AttributeError that names where transformers' model is for others."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_modules", {}).get("model")
            if model is None or name.startswith("_") or not hasattr(model, name):
                raise
            remedy = (
                "call save_model of the trainer"
                if name in ("save_pretrained", "push_to_hub")
                else (f"transformers' model is its model.{name}, with this rank's part of the weights")
            )
            raise AttributeError(f"the model that runs packs has no {name}: {remedy}") from None

    @property
    def counts_axes(self) -> bool:
        """Whether the model counts positions of media along axes, and its processor does not."""
        return self.family is not None and not self.family.num_axes and hasattr(self.media_model, "get_rope_index")

    @property
    def config(self) -> Any:
        """The config of transformers' model."""
        return self.model.config

    @property
    def base_model(self) -> PreTrainedModel | None:
        """The part that computes the hidden states, of media too; None where that is the whole model."""
        inner: Any = self.model.base_model
        base: PreTrainedModel | None = inner if inner is not self.model else getattr(self.model, "model", None)
        return base if base is None or has_modules(base, self._tower_paths.values()) else None

    @property
    def kept_apart(self) -> str:
        """How samples of a pack are kept apart, in words."""
        if self.by_sample is not None:
            return f"{', '.join(self.by_sample.names)} run on each sample alone"
        return "kernels of recurrent layers are given the bounds" if self.gives_bounds else "by positions and bounds"

    @property
    def media_model(self) -> PreTrainedModel:
        """The part that the towers of media lie in: the base model, or the whole model where they lie beside that."""
        return self.base_model or self.model

    @property
    def towers(self) -> Mapping[str, torch.nn.Module]:
        """Kind of media -> the part that reads it; none for a model without a family."""
        return {kind: self.media_model.get_submodule(path) for kind, path in self._tower_paths.items()}

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        embedding: Any = self.model.get_input_embeddings()
        return int(embedding.weight.shape[0])

    @property
    def num_predicted(self) -> int:
        """Token ids that the model can predict, from 0; Mllama's embedding has more rows."""
        head = run_module(self.model.get_output_embeddings())
        rows = getattr(getattr(head, "weight", None), "shape", None)
        return min(self.vocab_size, int(rows[0])) if rows else self.vocab_size

    @property
    def logits_ways(self) -> tuple[LogitsWay, ...]:
        """Ways to compute the loss that this model supports, the least memory first."""
        ways: list[LogitsWay] = ["whole"]
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            ways.insert(0, "kept")
        if self.base_model is not None or decoder_of(self.model) is not None:
            ways.insert(0, "chunks")
        return tuple(ways)

    @masks_of_packs()
    def forward(self, batch: Batch, packs: Sequence[Batch] = ()) -> PackLosses:
        """packs: those that the batch is joined of (default: it is one)."""
        learnt, targets = self.learnt(batch.labels, num_learnt=batch.num_loss_tokens)
        inputs = self._run_inputs(batch, packs)
        if self.router_weight and self.training:
            inputs["output_router_logits"] = True
        parts, every_learnt = self.sequence, learnt
        if parts is not None:
            learnt, targets = learnt_tokens(parts.labels(batch.labels))
            inputs = self._own(inputs, batch)
        with self._towers_run(batch, inputs) as zero:
            output, (of_tokens, logs) = self._losses(batch, inputs, learnt, targets)
        if parts is not None:
            of_tokens, logs = parts.whole_losses(of_tokens, logs, learnt, every_learnt, batch.num_tokens)
        router = None
        if self.router_weight and self.training:
            routed = [self._whole(each.flatten(0, -2), batch) for each in output.router_logits]
            router = router_loss(routed, packs or [batch], config=self.model.config)
        return PackLosses(of_tokens if zero is None else of_tokens + zero, logs, router)

    def learnt(self, labels: torch.Tensor, *, num_learnt: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The positions at which this model predicts a target, and the targets: see learnt_tokens."""
        return learnt_tokens(labels, num_learnt=num_learnt, ahead=int(self.is_causal))

    def _losses(
        self, batch: Batch, inputs: dict[str, Any], learnt: torch.Tensor, targets: torch.Tensor
    ) -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
        """Return the model's output, and the loss of each target with the logsumexp of its logits."""
        if self.logits_way == "chunks":
            base = self.base_model
            if base is not None:
                output = of_base = base(**inputs)
            else:
                base = decoder_of(self.model)
                assert base is not None
                output, of_base = run_to_hidden(self.model, base, inputs)
            every = of_base.last_hidden_state[0]
            head = self._head(base, of_base, batch)
            losses = token_losses(every[learnt], targets, head, vocab_size=self.vocab_size)
            self._tell(batch, lambda: every, head)
            return output, losses
        if self.logits_way == "kept":
            output = self.model(**inputs, logits_to_keep=learnt)
            return output, losses_of_logits(output.logits[0], targets)
        output = self.model(**inputs)
        losses = losses_of_logits(output.logits[0, learnt], targets)
        self._tell(batch, lambda: output.logits[0])
        return output, losses

    @contextmanager
    def _towers_run(self, batch: Batch, inputs: dict[str, Any]) -> Iterator[torch.Tensor | None]:
        """Gives 0, of towers of which the batch has no medium; inside, the model runs."""
        device = batch.input_ids.device
        if self._dummies is None:
            yield None
        elif len({*self._tower_paths.values()}) == 1:
            yield self._dummies.zero(self.media_model, batch.inputs, device)
        else:
            with self._dummies.run_first(self.media_model, inputs, device) as zero:
                yield zero

    def dummy_tokens(self, device: torch.device) -> dict[str, int]:
        """Tokens of the smallest medium of each kind; none for a model without a family."""
        return {} if self._dummies is None else self._dummies.num_tokens(self.media_model, device)

    @property
    def dummies(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """The smallest medium of each kind, by the names of its tensors."""
        return {} if self._dummies is None else self._dummies.of_kind

    def _head(self, base: PreTrainedModel, output: Any, batch: Batch) -> Head:
        """The head, hidden states -> logits: the model itself, called with the output of its base model."""
        quiet = {"output_router_logits": False} if self.router_weight else {}
        own = SharedParameters(run_module(self.model.get_output_embeddings()))

        def head(hidden: torch.Tensor) -> torch.Tensor:
            with _given(base, output, hidden[None]), own.used():
                ids = batch.input_ids[:, : len(hidden)]
                logits: torch.Tensor = self.model(input_ids=ids, use_cache=False, **quiet).logits
            return logits[0]

        return head

    @masks_of_packs()
    def logits(self, batch: Batch) -> torch.Tensor:
        """The model's own logits, of every token: float[1, T, V], no view, which FSDP's hooks would not follow."""
        logits = self._whole(self.model(**self._own(self._run_inputs(batch), batch)).logits, batch, dim=1)
        if self.read_logits is not None:
            self.read_logits(batch, lambda part: logits[0, part])
        return logits

    def _tell(self, batch: Batch, values: Callable[[], torch.Tensor], head: Head = lambda logits: logits) -> None:
        """Give read_logits what the head makes of values of tokens: float[T, …], or those of this rank's part."""
        if self.read_logits is not None:
            every = self._whole(values(), batch)
            self.read_logits(batch, lambda part: head(every[part]))

    def _own(self, inputs: dict[str, Any], batch: Batch) -> dict[str, Any]:
        """The arguments of the model for the tokens that this rank runs; call it once the bounds of samples are set."""
        if self.sequence is None:
            return inputs
        return self.sequence.own(inputs, of_tokens=("input_ids", *batch.token_inputs))

    def _whole(self, of_tokens: torch.Tensor, batch: Batch, *, dim: int = 0) -> torch.Tensor:
        """Values of all tokens of a batch, where those of this rank's part may be given."""
        return of_tokens if self.sequence is None else self.sequence.whole(of_tokens, batch.num_tokens, dim=dim)

    def plain_logits(self, sample: Batch) -> torch.Tensor:
        """Logits of one sample without packing, as users of transformers run the model: float[1, T, V]."""
        positions = sample.position_ids
        bounds: dict[str, Any] = {}
        if self.model.config._attn_implementation == SDPA_VARLEN:
            bounds = {"cu_seq_lens_q": sample.cu_seqlens.cpu()}  # which has no other way
        elif self.model.config._attn_implementation == VARLEN:
            bounds = {"cu_seq_lens_q": sample.cu_seqlens, "max_length_q": sample.max_seqlen}
        if "position_ids" in inspect.signature(self.model.forward).parameters and not self.counts_axes:
            bounds["position_ids"] = positions[1:] if positions.ndim == 3 else positions
        logits: torch.Tensor = self.model(
            input_ids=sample.input_ids,
            attention_mask=torch.ones_like(sample.input_ids),
            use_cache=False,
            **model_inputs(self.family, self.media_model, sample.inputs),
            **self._token_inputs(sample),
            **bounds,
        ).logits
        return logits

    def check_tokens(self, pack: Batch) -> None:
        """ConfigError for a pack, on the CPU, with a token id that the model does not have."""
        lowest, highest = (int(bound) for bound in torch.aminmax(pack.input_ids))
        label = int(pack.labels.max())
        if lowest >= 0 and highest < self.vocab_size and label < self.num_predicted:
            return
        token_id = lowest if lowest < 0 else label if label >= self.num_predicted else highest
        position = torch.nonzero((pack.input_ids[0] == token_id) | (pack.labels[0] == token_id))[0]
        sample = pack.sample_of(int((pack.cu_seqlens <= position).sum()) - 1)
        raise ConfigError(
            f"token id {token_id} in sample {sample}{pack.source and f' of {pack.source}'} is "
            f"none of the model's {self.vocab_size}: take the model's own tokenizer, or resize its embedding"
        )

    def check_processor(self, processor: Processor | None) -> None:
        """ConfigError for one with a tokenizer that has tokens which the model does not have."""
        tokenizer = getattr(processor, "tokenizer", None)
        if isinstance(tokenizer, FastTokenizer) and tokenizer.num_ids > self.vocab_size:
            raise ConfigError(
                f"tokenizer {tokenizer.name} has token ids to {tokenizer.num_ids - 1}, the model {self.vocab_size} "
                "tokens: take the model's own tokenizer, or resize its embedding"
            )

    def _run_inputs(self, batch: Batch, packs: Sequence[Batch] = ()) -> dict[str, Any]:
        """The arguments of the model; packs: those that the batch is joined of, on the CPU, where they are known."""
        inputs = self._inputs(batch)
        attention = self.model.config._attn_implementation
        if self.by_sample is not None or (attention == SDPA_VARLEN and not self.gives_bounds):
            bounds = joined_bounds(packs) if packs else batch.cu_seqlens.cpu()
            if attention == SDPA_VARLEN:
                inputs["cu_seq_lens_q"] = bounds
            if self.by_sample is not None:
                inputs[BySample.ARGUMENT] = PackSamples(bounds.tolist(), batch.input_ids.device)
        return inputs

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        """The arguments of a transformers model that keep the segments of a pack apart.

        sdpa, eager and flex_attention do so where position_ids restart, but only without an attention mask and without
        a cache; flash_attention_2, varlen and sdpa_varlen take the bounds of the segments.
        """
        positions = batch.position_ids
        inputs: dict[str, Any] = {
            "input_ids": batch.input_ids,
            "attention_mask": None,
            "use_cache": False,
            **model_inputs(self.family, self.media_model, batch.inputs),
            **self._token_inputs(batch),
        }
        if batch.inputs and self.counts_axes:
            positions = positions_along_axes(self.media_model, batch, inputs)
        elif self._has_text_axis and positions.ndim == 2:
            positions = positions.expand(4, *positions.shape)  # the four axes of a text have the same positions
        inputs["position_ids"] = positions
        if "position_ids" not in inspect.signature(self.model.forward).parameters:
            del inputs["position_ids"]
        if self.gives_bounds:
            inputs |= {"cu_seq_lens_q": batch.cu_seqlens, "seq_idx": _numbers_of_samples(batch.cu_seqlens)}
        if self.model.config._attn_implementation == SDPA_VARLEN:
            inputs["cu_seq_lens_q"] = batch.cu_seqlens
        elif self.model.config._attn_implementation in ("flash_attention_2", VARLEN):
            bounds = {"cu_seq_lens_q": batch.cu_seqlens, "cu_seq_lens_k": batch.cu_seqlens}
            inputs |= {**bounds, "max_length_q": batch.max_seqlen, "max_length_k": batch.max_seqlen}
        return inputs

    def _token_inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        """One value a token of each input that the family has of this kind: 0 where the batch has none."""
        names: tuple[str, ...] = getattr(self.family, "token_inputs", ())
        made = {name: torch.zeros_like(batch.input_ids) for name in names} | dict(batch.token_inputs)
        if not made:
            return {}
        known = inspect.signature(self.model.forward).parameters  # processors make some that models only read elsewhere
        return {name: values for name, values in made.items() if name in known}


def _numbers_of_samples(bounds: torch.Tensor) -> torch.Tensor:
    """int32[n + 1] -> which sample each token is of: int32[1, T]."""
    numbers = torch.arange(len(bounds) - 1, dtype=torch.int32, device=bounds.device)
    return numbers.repeat_interleave(bounds.diff())[None]


@contextmanager
def _given(base: torch.nn.Module, output: Any, hidden: torch.Tensor) -> Iterator[None]:
    """Inside, the base model returns an output that it gave before, but with these hidden states."""
    given = type(output)(**{**output, "last_hidden_state": hidden})
    before = vars(base).get("forward")
    base.forward = lambda *_, **__: given
    try:
        yield
    finally:
        del base.forward
        if before is not None:
            base.forward = before
