"""Run transformers models on packs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch.utils._pytree import tree_leaves

from ...errors import ConfigError, LmmsStreamError
from ...loader.collate import joined_bounds
from ...processors.base import Processor
from ...processors.families.family import Family, towers_of
from ...processors.tokenizers import FastTokenizer
from ...registry import imported
from ...types import Batch
from ...versions.transformers import masks_of_packs, name_missing_output
from .adapters import run_module, take_adapter
from .attention import BY_BOUNDS, SDPA_VARLEN, VARLEN, has_axes
from .build import check_config
from .by_sample import BySample, PackSamples
from .loss import (
    Head,
    SharedParameters,
    called_inside,
    decoder_of,
    learnt_tokens,
    losses_of_logits,
    replaced,
    router_loss,
    router_weight,
    run_around,
    run_to_hidden,
    token_losses,
)
from .towers import (
    Dummies,
    MediaShares,
    has_modules,
    model_inputs,
    parts_of,
    positions_along_axes,
    without_bounds_of_text,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LogitsWay = Literal["chunks", "kept", "whole"]
LogitsOf = Callable[[slice], torch.Tensor]  # tokens of a batch -> their logits, float[n, V]


class PackLosses(NamedTuple):
    """Loss of each target in order, and the logsumexp of its logits: float32[num_loss_tokens] each.

    router: sum over packs of tokens times the auxiliary loss of experts, before weighting; None without experts and
    outside of training.
    """

    tokens: torch.Tensor
    logs: torch.Tensor
    router: torch.Tensor | None


class TokenParts(MediaShares, Protocol):
    """The tokens of a pack in equal parts, one for each rank of a group: see plugins/parallel/sequence.py."""

    @property
    def degree(self) -> int:
        """Number of ranks in the group."""

    def own(self, inputs: Mapping[str, Any], *, of_tokens: Sequence[str]) -> dict[str, Any]:
        """Return a model's arguments for this rank's part. of_tokens: names of arguments with a number per token."""

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the last dimension."""

    def labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the labels of this rank's part and of the next token: int64[1, n]."""

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
        """Keep only attentions without a mask in `choices`; return the reason against each other name."""


class PackedModel(torch.nn.Module):
    """A transformers model with its loss on packs; FSDP shards this module as a whole.

    logits_way: computation of the logits that predict a target, always by the model's own forward pass, with its
    scales, caps and biases. "chunks": some tokens at a time, from hidden states computed once. "kept": all these tokens
    at once, by the argument logits_to_keep. "whole": all tokens. choice.prove_packing finds the way with the least
    memory and the same losses. family: of the media processors; None for text.

    sequence: if set, the ranks of a group run the blocks on parts of the tokens, and the towers on shares of the media;
    each rank has the losses, logits and router's losses of whole packs, and gradients of its own part and share.

    by_sample: if set, some layers run on each sample alone. gives_bounds: pass the bounds of samples in the arguments
    of kernels of recurrent layers.

    is_causal: whether a token sees only earlier tokens and predicts the next token. A subclass whose tokens see their
    whole sample and predict themselves sets is_causal to False.

    usual_lengths: returns the tokens of the samples of a usual pack, for a trial of attentions; empty if unknown.

    read_logits: if set, forward passes with cheap logits of all tokens of a batch call it with the batch and these
    logits, before they end.
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
        self.usual_lengths: Callable[[], Sequence[int]] = tuple
        self.router_weight = router_weight(model)
        self._has_text_axis = has_axes(model.config)
        self.logits_way: LogitsWay = self.logits_ways[0]
        if (prepare := getattr(family, "prepare_model", None)) is not None:
            prepare(self.media_model)
        for path in filter(None, set(self._tower_paths.values())):
            tower = self.media_model.get_submodule(path)
            tower.register_forward_pre_hook(without_bounds_of_text, with_kwargs=True)

    def __getattr__(self, name: str) -> Any:
        """Return a parameter or module; AttributeError names the transformers model for its other attributes."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_modules", {}).get("model")
            if model is None or name.startswith("_") or not hasattr(model, name):
                raise
            remedy = (
                "call save_model of the trainer"
                if name in ("save_pretrained", "push_to_hub")
                else f"use its model.{name}: its model is transformers', with this rank's part of the weights"
            )
            raise AttributeError(f"the model that runs packs has no {name}: {remedy}") from None

    @property
    def counts_axes(self) -> bool:
        """Whether positions of media along axes are counted by the model, not by its processor."""
        return self.family is not None and not self.family.num_axes and hasattr(self.media_model, "get_rope_index")

    @property
    def config(self) -> Any:
        """Config of the transformers model."""
        return self.model.config

    @property
    def base_model(self) -> PreTrainedModel | None:
        """Part that computes the hidden states, of media, too; None if this is the whole model."""
        inner: Any = self.model.base_model
        base: PreTrainedModel | None = inner if inner is not self.model else getattr(self.model, "model", None)
        return base if base is None or has_modules(base, self._tower_paths.values()) else None

    @property
    def kept_apart(self) -> str:
        """Description of how samples of a pack are kept apart."""
        if self.by_sample is not None:
            return f"{', '.join(self.by_sample.names)} run on each sample alone"
        return "kernels of recurrent layers are given the bounds" if self.gives_bounds else "by positions and bounds"

    @property
    def media_model(self) -> PreTrainedModel:
        """Part with the media towers: the base model, or the whole model if the towers are outside the base model."""
        return self.base_model or self.model

    @property
    def towers(self) -> Mapping[str, torch.nn.Module]:
        """Kind of media -> its tower; {} for a model without a family."""
        return {kind: self.media_model.get_submodule(path) for kind, path in self._tower_paths.items()}

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        embedding: Any = self.model.get_input_embeddings()
        return int(embedding.weight.shape[0])

    @property
    def num_predicted(self) -> int:
        """Number of token ids that the model can predict, from 0; Mllama's embedding has more rows."""
        head = run_module(self.model.get_output_embeddings())
        rows = getattr(getattr(head, "weight", None), "shape", None)
        return min(self.vocab_size, int(rows[0])) if rows else self.vocab_size

    @property
    def ends(self) -> tuple[torch.nn.Embedding | torch.nn.Linear, ...]:
        """Embedding and head as units of FSDP: () if they share a parameter, or have hooks or parts of their own.

        A shared parameter is used at both ends of a pass, and would stay gathered in a unit, too. The final norm stays
        in the root: a unit with the head would save the gather of a few KB, and need both in each pass.

        Of models with towers only the head: ranks with and without media run the towers and the embedding in different
        orders, and gather them in these orders.
        """
        pair: tuple[Any, Any] = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        if [*map(type, pair)] != [torch.nn.Embedding, torch.nn.Linear] or pair[0].weight is pair[1].weight:
            return ()
        if any(each._forward_hooks or each._forward_pre_hooks for each in pair):
            return ()
        return pair[1:] if self._tower_paths else pair

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
        """Return the losses of a batch. packs: the packs joined in the batch (default: the batch is a single pack)."""
        learnt, targets = self.learnt(batch.labels, num_learnt=batch.num_loss_tokens)
        inputs = self._run_inputs(batch, packs)
        if self.router_weight and self.training:
            inputs["output_router_logits"] = True
        parts, every_learnt = self.sequence, learnt
        if parts is not None:
            learnt, targets = learnt_tokens(parts.labels(batch.labels))
            inputs = self._own(inputs, batch)
        with self._towers_run(batch, inputs):
            output, (of_tokens, logs) = self._losses(batch, inputs, learnt, targets)
        if parts is not None:
            of_tokens, logs = parts.whole_losses(of_tokens, logs, learnt, every_learnt, batch.num_tokens)
        router = None
        if self.router_weight and self.training:
            routed = [self._whole(each.flatten(0, -2), batch) for each in output.router_logits]
            router = router_loss(routed, packs or [batch], config=self.model.config)
        return PackLosses(of_tokens, logs, router)

    def learnt(self, labels: torch.Tensor, *, num_learnt: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions that predict a target, and the targets: see learnt_tokens."""
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

            def run(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                head = self._head(base, of_base, batch)
                losses = token_losses(hidden, targets, head, vocab_size=self.vocab_size)
                self._tell(batch, lambda: every, head)
                return losses

            return output, run_around(run_module(self.model.get_output_embeddings()), run, every[learnt])
        if self.logits_way == "kept":
            output = self.model(**inputs, logits_to_keep=learnt)
            return output, losses_of_logits(output.logits[0], targets)
        output = self.model(**inputs)
        losses = losses_of_logits(output.logits[0, learnt], targets)
        self._tell(batch, lambda: output.logits[0])
        return output, losses

    @contextmanager
    def _towers_run(self, batch: Batch, inputs: dict[str, Any]) -> Iterator[None]:
        """Run the towers of kinds without media in the batch on the smallest media; the model runs inside this context.

        Add 0, from their outputs, to the embeddings: as on ranks with media, the backward pass goes through all blocks
        to the towers, even if the embedding is not trained. FSDP sums gradients in this order.
        """
        if self._dummies is None:
            yield
            return
        run: AbstractContextManager[torch.Tensor]
        if len({*self._tower_paths.values()}) == 1 and self.sequence is None:
            run = nullcontext(self._dummies.zero(self.media_model, batch.inputs, batch.input_ids.device))
        else:
            run = self._dummies.run_first(self.media_model, inputs, batch.input_ids, self.sequence)
        with run as zero:
            embedding: Any = self.model.get_input_embeddings()
            hook = embedding.register_forward_hook(lambda _, __, output: output + zero.to(output.dtype))
            try:
                yield
            finally:
                hook.remove()

    def dummy_tokens(self, device: torch.device) -> dict[str, int]:
        """Return the tokens of the smallest medium of each kind; {} for a model without a family."""
        return {} if self._dummies is None else self._dummies.num_tokens(self.media_model, device)

    @property
    def dummies(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Smallest medium of each kind: kind -> name -> tensor."""
        return {} if self._dummies is None else self._dummies.of_kind

    def _head(self, base: PreTrainedModel, output: Any, batch: Batch) -> Head:
        """Return the head, hidden states -> logits: the model itself, called with its base model's output."""
        quiet = {"output_router_logits": False} if self.router_weight else {}
        module = run_module(self.model.get_output_embeddings())
        own = SharedParameters(module)

        def head(hidden: torch.Tensor) -> torch.Tensor:
            given = type(output)(**{**output, "last_hidden_state": hidden[None]})
            with replaced(base, lambda *_, **__: given), called_inside(module), own.used():
                ids = batch.input_ids[:, : len(hidden)]
                logits: torch.Tensor = self.model(input_ids=ids, use_cache=False, **quiet).logits
            return logits[0]

        return head

    @masks_of_packs()
    def logits(self, batch: Batch) -> torch.Tensor:
        """Return the logits of all tokens: float[1, T, V]; no view, because FSDP's hooks do not follow views."""
        inputs = self._own(self._run_inputs(batch), batch)
        with nullcontext() if self.sequence is None else self._towers_run(batch, inputs):
            own = self.model(**inputs).logits
        logits = self._whole(own, batch, dim=1)
        if self.read_logits is not None:
            self.read_logits(batch, lambda part: logits[0, part])
        return logits

    def _tell(self, batch: Batch, values: Callable[[], torch.Tensor], head: Head = lambda logits: logits) -> None:
        """Call read_logits with the head's logits. values: hidden states of all tokens, or of this rank's part."""
        if self.read_logits is not None:
            every = self._whole(values(), batch)
            self.read_logits(batch, lambda part: head(every[part]))

    def _own(self, inputs: dict[str, Any], batch: Batch) -> dict[str, Any]:
        """Return the model's arguments for this rank's tokens; call this after the bounds of samples are set."""
        if self.sequence is None:
            return inputs
        return self.sequence.own(inputs, of_tokens=("input_ids", *self._token_inputs(batch)))

    def _whole(self, of_tokens: torch.Tensor, batch: Batch, *, dim: int = 0) -> torch.Tensor:
        """Return values of all tokens of a batch from all tokens' values, or from this rank's part."""
        return of_tokens if self.sequence is None else self.sequence.whole(of_tokens, batch.num_tokens, dim=dim)

    def plain_logits(self, sample: Batch) -> torch.Tensor:
        """Return the logits of a sample without packing, as users of transformers run the model: float[1, T, V]."""
        positions = sample.position_ids
        bounds: dict[str, Any] = {}
        if self.model.config._attn_implementation == SDPA_VARLEN:
            bounds = {"cu_seq_lens_q": sample.cu_seqlens.cpu()}  # always needs bounds
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
        """Raise ConfigError for a pack, on the CPU, with a token id outside the model's vocabulary."""
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
        """Raise ConfigError for a processor whose tokenizer has token ids outside the model's vocabulary."""
        tokenizer = getattr(processor, "tokenizer", None)
        if isinstance(tokenizer, FastTokenizer) and tokenizer.num_ids > self.vocab_size:
            raise ConfigError(
                f"tokenizer {tokenizer.name} has token ids to {tokenizer.num_ids - 1}, the model {self.vocab_size} "
                "tokens: take the model's own tokenizer, or resize its embedding"
            )

    def _run_inputs(self, batch: Batch, packs: Sequence[Batch] = ()) -> dict[str, Any]:
        """Return the model's arguments. packs: the packs joined in the batch, on the CPU, if known."""
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
        """Return the arguments with which a transformers model keeps the segments of a pack apart.

        sdpa, eager and flex_attention separate segments by restarting position_ids, but only without an attention mask
        and a cache; sdpa_varlen and the kernels of BY_BOUNDS take the bounds of the segments.
        """
        positions = batch.position_ids
        inputs: dict[str, Any] = {
            "input_ids": batch.input_ids,
            "attention_mask": None,
            "use_cache": False,
            **model_inputs(self.family, self.media_model, batch.inputs),
            **self._token_inputs(batch),
        }
        if self._lacks_axes(batch):
            positions = positions_along_axes(self.media_model, batch, inputs)
        elif self._has_text_axis and positions.ndim == 2:
            positions = positions.expand(4, *positions.shape)  # the four axes of a text have the same positions
        inputs["position_ids"] = positions
        if "position_ids" not in inspect.signature(self.model.forward).parameters:
            del inputs["position_ids"]
        if self.gives_bounds:
            inputs |= {"cu_seq_lens_q": batch.cu_seqlens, "seq_idx": _numbers_of_samples(batch)}
        if self.model.config._attn_implementation == SDPA_VARLEN:
            inputs["cu_seq_lens_q"] = batch.cu_seqlens
        elif self.model.config._attn_implementation in BY_BOUNDS:
            bounds = {"cu_seq_lens_q": batch.cu_seqlens, "cu_seq_lens_k": batch.cu_seqlens}
            inputs |= {**bounds, "max_length_q": batch.max_seqlen, "max_length_k": batch.max_seqlen}
        return inputs

    def with_axes(self, batch: Batch) -> Batch:
        """Return a batch with positions along axes, if it has media and the model counts them.

        Call this method with a batch on the CPU: the model's code reads token ids and sizes of media.
        """
        if not self._lacks_axes(batch):
            return batch
        media = model_inputs(self.family, self.media_model, batch.inputs)
        given = {"input_ids": batch.input_ids, **media, **self._token_inputs(batch)}
        return replace(batch, position_ids=positions_along_axes(self.media_model, batch, given))

    def _lacks_axes(self, batch: Batch) -> bool:
        return bool(batch.inputs) and batch.position_ids.ndim == 2 and self.counts_axes

    def _token_inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return the family's inputs with a value per token: 0 for inputs that the batch lacks."""
        names: tuple[str, ...] = getattr(self.family, "token_inputs", ())
        made = {name: torch.zeros_like(batch.input_ids) for name in names} | dict(batch.token_inputs)
        if not made:
            return {}
        known = inspect.signature(self.model.forward).parameters  # processors may make more inputs
        return {name: values for name, values in made.items() if name in known}


def _numbers_of_samples(batch: Batch) -> torch.Tensor:
    """Return the number of each token's sample: int32[1, T]."""
    bounds = batch.cu_seqlens
    numbers = torch.arange(len(bounds) - 1, dtype=torch.int32, device=bounds.device)
    return numbers.repeat_interleave(bounds.diff(), output_size=batch.num_tokens)[None]


def run_drawn(model: PreTrainedModel, folder: Path, drawn: torch.Generator, *, num_tokens: int) -> None:
    """Run a model on drawn token ids, and its towers on drawn media if the folder has a processor of media."""
    family: Family | None = None
    if (folder / "preprocessor_config.json").exists() or (folder / "processor_config.json").exists():
        with suppress(LmmsStreamError):  # of another processor: the caller gives the towers' layers drawn inputs
            family = imported("processors.multimodal:MultimodalProcessor").from_pretrained(str(folder)).family
    packed = PackedModel(model, family)
    model(input_ids=torch.randint(0, packed.num_predicted, (1, num_tokens), generator=drawn), use_cache=False)
    if family is not None:
        media = Dummies(family)
        for each in tree_leaves(media.of_kind):
            if each.is_floating_point():
                each.normal_(generator=drawn)
        media.zero(packed.media_model, {}, torch.device("cpu"))
