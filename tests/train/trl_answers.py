"""Losses and gradients of TRL's own trainers on the rows of answers.py: padded, in one process, as one batch."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from .answers import REFERENCE, TRAINED, VOCABULARY, Row


def trl_step(kind: str, rows: list[Row], **settings: Any) -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
    """The loss of one batch by TRL's DPOTrainer or KTOTrainer (kind: "DPO", "KTO"), its gradients, and its figures."""
    import trl

    class Tokenized(getattr(trl, f"{kind}Trainer")):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
            return dataset

    arguments = getattr(trl, f"{kind}Config")(
        output_dir=tempfile.gettempdir(), use_cpu=True, report_to=[], bf16=False, gradient_checkpointing=False,
        per_device_train_batch_size=len(rows), **settings,
    )  # fmt: skip
    trainer = Tokenized(
        model=_model(TRAINED), ref_model=_model(REFERENCE), args=arguments,
        train_dataset=Dataset.from_list(_columns(rows)), processing_class=_tokenizer(),
    )  # fmt: skip
    model = trainer.model.train()
    loss = trainer.compute_loss(model, trainer.data_collator(_columns(rows)))
    loss.backward()
    figures = {name: float(values[-1]) for name, values in trainer._metrics["train"].items()}
    return float(loss.detach()), {name: each.grad for name, each in model.named_parameters()}, figures


def _columns(rows: list[Row]) -> list[Mapping[str, Any]]:
    """As TRL's trainers tokenize pairs, or answers by themselves with those of the row before."""
    if len(rows[0].answers) == 2:
        return [
            {"prompt_ids": row.prompt, "chosen_ids": row.answers[0], "rejected_ids": row.answers[1]} for row in rows
        ]
    return [
        {
            "prompt_ids": row.prompt,
            "completion_ids": row.answers[0],
            "KL_completion_ids": rows[index - 1].answers[0],
            "label": bool(row.roles[0]),
        }
        for index, row in enumerate(rows)
    ]


def _model(config: Any) -> LlamaForCausalLM:
    model: LlamaForCausalLM = config.build()
    return model


def _tokenizer() -> PreTrainedTokenizerFast:
    """TRL asks it for its padding alone."""
    words = {f"t{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t1", pad_token="t0")
