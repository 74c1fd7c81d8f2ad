"""Data collators of transformers or TRL -> our collators, from the samples of a pack to a Batch.

A collator gets the same input as in transformers: a list of samples, {"input_ids": […], "labels": […],
"attention_mask": […]}. Its output is split again, since packs have no padding: a batch with an attention_mask by rows,
one sequence of all samples (DataCollatorWithFlattening, TRL's padding_free) at each position_id of 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import ConfigError
from ...loader.batch_maker import Collator
from ...loader.collate import PackCollator, collate
from ...processors.base import IGNORED_LABEL
from ...types import Batch, Processed

_KNOWN = frozenset({
    "input_ids", "labels", "attention_mask", "position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k",
    "max_length_q", "max_length_k",
})  # what a collator of texts may make # fmt: skip


def adapted(collator: Callable[..., Any]) -> Collator:
    """Return our collators unchanged, recognized by their parameters, and others in a CollatorAdapter.

    The collator of a dataset of packs (get_collator) makes the loader's own batches, and becomes `collate`. ConfigError
    for an unsupported collator.
    """
    if isinstance(collator, PackCollator):
        return collate
    if not callable(collator):
        raise ConfigError(f"data_collator is a {type(collator).__name__}, which cannot be called: give a function")
    try:
        parameters = inspect.signature(collator).parameters.values()
    except ValueError:
        parameters = ()  # type: ignore[assignment]
    if any(each.name == "sample_ids" or each.kind is each.VAR_KEYWORD for each in parameters):
        return collator
    if getattr(collator, "mlm", False):
        raise ConfigError(
            f"data_collator {type(collator).__name__} masks tokens (mlm=True), and the model predicts the next token: "
            "set mlm=False, or leave data_collator out"
        )
    return CollatorAdapter(collator)


@dataclass(frozen=True, slots=True)
class CollatorAdapter:
    """A data collator over samples as lists.

    collator: may change tokens and labels, but neither the number nor the order of the samples.
    """

    collator: Callable[[list[dict[str, Any]]], Mapping[str, Any]]

    def __call__(self, samples: Sequence[Processed], sample_ids: Sequence[int], **options: Any) -> Batch:
        """See collate; ConfigError for output without a Batch form."""
        if not samples:
            return collate(samples, sample_ids, **options)
        for sample in samples:
            if "sequences" in sample:
                raise ConfigError(f"data_collator {self._name} cannot take pairs of answers: leave it out")
            if sample.get("media") or "position_ids" in sample:
                raise ConfigError(f"data_collator {self._name} cannot take samples with media: leave it out")
        made = {name: _array(value) for name, value in self.collator(self._given(samples)).items()}
        unknown = sorted(made.keys() - _KNOWN)
        if unknown or "input_ids" not in made or "labels" not in made:
            raise ConfigError(
                f"data_collator {self._name} makes {', '.join(made)}: a batch is made of input_ids and labels, with an "
                "attention_mask or position_ids; write a collator of lmms_stream's (loader/collate.py) for others"
            )
        taken = _flat(made) if len(made["input_ids"]) == 1 and "attention_mask" not in made else self._rows(made)
        if len(taken) != len(samples):
            raise ConfigError(
                f"data_collator {self._name} makes {len(taken)} sequences of {len(samples)} samples: it must keep "
                "their number and order"
            )
        return collate(taken, sample_ids, **options)

    @property
    def _name(self) -> str:
        return getattr(self.collator, "__name__", type(self.collator).__name__)

    def _given(self, samples: Sequence[Processed]) -> list[dict[str, Any]]:
        """Return the samples as lists; transformers' DataCollatorForLanguageModeling makes the labels of all tokens."""
        makes_labels = any(
            each.__name__ == "DataCollatorForLanguageModeling" and each.__module__.startswith("transformers.")
            for each in type(self.collator).__mro__
        )
        given = []
        for sample in samples:
            ids, labels = sample["input_ids"], sample["labels"]
            each = {"input_ids": ids.tolist(), "attention_mask": [1] * len(ids), "labels": labels.tolist()}
            if makes_labels:
                if (labels[1:] == IGNORED_LABEL).any():
                    raise ConfigError(
                        f"data_collator {self._name} learns every token, and a sample says that some are not learnt: "
                        "leave data_collator out"
                    )
                del each["labels"]
            given.append(each)
        return given

    def _rows(self, made: Mapping[str, Any]) -> list[Processed]:
        """Return the sample of each row, without padding."""
        ids, labels = made["input_ids"], made["labels"]
        mask = made.get("attention_mask", np.ones_like(ids))
        if ids.ndim != 2 or labels.shape != ids.shape or mask.shape != ids.shape:
            raise ConfigError(
                f"data_collator {self._name} makes input_ids {list(ids.shape)}, labels {list(labels.shape)} and "
                f"attention_mask {list(mask.shape)}: they must have one shape, [samples, tokens]"
            )
        kept = mask != 0
        return [{"input_ids": ids[row][kept[row]], "labels": labels[row][kept[row]]} for row in range(len(ids))]


def _flat(made: Mapping[str, Any]) -> list[Processed]:
    """Return the samples of one sequence; each begins at a position_id of 0."""
    ids, labels = made["input_ids"][0], made["labels"][0]
    positions = made.get("position_ids")
    if positions is None or positions.shape != made["input_ids"].shape:
        return [{"input_ids": ids, "labels": labels}]
    starts = np.flatnonzero(positions[0] == 0)
    bounds = zip(starts, [*starts[1:], len(ids)], strict=True)
    return [{"input_ids": ids[start:stop], "labels": labels[start:stop]} for start, stop in bounds]


def _array(value: Any) -> Any:
    return np.asarray(value)
