"""Hidden states of a model that puts what its towers make among the text outside of its base model.

Qwen2-Audio, Llama 4 and the thinkers of Qwen-Omni do so in the forward that makes the logits too. It is run with its
head standing aside, and its decoder of text is listened to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from .adapters import run_module

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def decoder_of(model: PreTrainedModel) -> PreTrainedModel | None:
    """The part that makes hidden states of embedded tokens; None where it is not told, or holds the head too."""
    find = getattr(model, "get_decoder", None)
    decoder: Any = None if find is None else find()
    head = run_module(model.get_output_embeddings())
    if head is None or not isinstance(decoder, torch.nn.Module) or decoder is model:
        return None
    made: Any = decoder
    return None if any(each is head for each in decoder.modules()) else made


def run_to_hidden(model: PreTrainedModel, decoder: torch.nn.Module, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
    """What the model gives, whose logits are the hidden states, and what its decoder gave."""
    found: list[Any] = []
    listening = decoder.register_forward_hook(lambda _, __, output: found.append(output))
    try:
        with _aside(run_module(model.get_output_embeddings())):
            output = model(**inputs)
    finally:
        listening.remove()
    (of_decoder,) = found
    return output, of_decoder


@contextmanager
def _aside(head: Any) -> Iterator[None]:
    """Inside, the head gives what it is given."""
    before = vars(head).get("forward")
    head.forward = lambda hidden: hidden
    try:
        yield
    finally:
        del head.forward
        if before is not None:
            head.forward = before
