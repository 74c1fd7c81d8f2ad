"""What becomes of each field that TRL's SFTConfig adds, and its default, for arguments that are not an SFTConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .fields import honoured, moot, refused

# As TRL 1.16 has them; TRL itself makes an SFTConfig of plain TrainingArguments.
DEFAULTS: Mapping[str, Any] = {
    "model_init_kwargs": None,
    "trust_remote_code": False,
    "router_aux_loss_coef": None,
    "chat_template_path": None,
    "dataset_text_field": "text",
    "dataset_kwargs": None,
    "dataset_num_proc": None,
    "eos_token": None,
    "max_length": 1024,
    "truncation_mode": "keep_start",
    "shuffle_dataset": False,
    "packing": False,
    "packing_strategy": "bfd",
    "padding_free": False,
    "pad_to_multiple_of": None,
    "eval_packing": None,
    "completion_only_loss": None,
    "assistant_only_loss": False,
    "loss_type": "nll",
    "activation_offloading": False,
    "pad_token": None,
}

ROWS = (
    honoured("model_init_kwargs", "dtype, attn_implementation and trust_remote_code, of a model that is named; others are refused"),
    honoured("trust_remote_code", "whether code of the model's folder may run, where it is asked for"),
    refused("router_aux_loss_coef", "the weight is the config's: set router_aux_loss_coef in the model's config.json"),
    honoured("chat_template_path", "a template's file, or the folder or name of a tokenizer whose template is taken; new tokens are refused"),
    honoured("dataset_text_field", "the column of texts"),
    honoured("dataset_kwargs", "skip_prepare_dataset is refused but for rows of input_ids; cache_folder says where shards are kept (default: datasets/ in output_dir)"),
    honoured("dataset_num_proc", "processes that make tokens of rows"),
    honoured("eos_token", "the end-of-text token of the tokenizer"),
    honoured("max_length", "packing_length; without packing, longer samples are cut"),
    honoured("truncation_mode", "which end of a sample stays, without packing; packs keep the start"),
    moot("shuffle_dataset", "samples are shuffled before they are packed, in each epoch anew"),
    honoured("packing", "whether a pack holds several samples; without, it is one sample, and no sample is padded"),
    honoured("packing_strategy", "what becomes of longer samples: bfd cuts, bfd_split splits them; packs are made by best_fit over all samples. wrapped is refused"),
    moot("padding_free", "no batch is padded"),
    moot("pad_to_multiple_of", "no batch is padded", lambda value: value is None),
    honoured("eval_packing", "packing, of the eval_dataset"),
    honoured("completion_only_loss", "whether the prompt is learnt too"),
    honoured("assistant_only_loss", "whether only what the assistant says is learnt"),
    refused("loss_type", "the loss is the cross entropy of the targets: for dft give task=DynamicFineTuning()", lambda value: value in ("nll", "chunked_nll")),
    refused("activation_offloading", "activations stay on the device: set gradient_checkpointing"),
    moot("pad_token", "no batch is padded"),
)  # fmt: skip
