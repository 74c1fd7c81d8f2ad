"""Fields added by TRL's SFTConfig, DPOConfig and KTOConfig: the effect of each, and its default in TRL 1.16.

Defaults are for arguments of another class: TRL itself makes an SFTConfig from plain TrainingArguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .fields import honoured, moot, refused

SFT_DEFAULTS: Mapping[str, Any] = {
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

SFT_ROWS = (
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

PREFERENCE_DEFAULTS: Mapping[str, Any] = {
    "disable_dropout": True,
    "precompute_ref_log_probs": False,
    "beta": 0.1,
    "label_smoothing": 0.0,
    "desirable_weight": 1.0,
    "undesirable_weight": 1.0,
}

_ALIKE = {row.name: row for row in SFT_ROWS}
_FOLLOWS = "the reference stays as the run began"

PREFERENCE_ROWS = (
    *(_ALIKE[name] for name in (
        "model_init_kwargs", "trust_remote_code", "router_aux_loss_coef", "dataset_num_proc", "padding_free",
        "pad_to_multiple_of", "activation_offloading", "pad_token",
    )),
    honoured("disable_dropout", "whether modules of dropout do nothing"),
    honoured("max_length", "tokens of a prompt with one of its answers; longer ones are cut, as in TRL. With images, pairs that are longer than two of them are left out and counted"),
    honoured("truncation_mode", "which end of a sequence stays"),
    honoured("precompute_ref_log_probs", "reference: stored, where the task has that (see preferences), else model"),
    moot("precompute_ref_batch_size", "the reference reads packs as training does"),
    honoured("loss_type", "loss_type of the task: sigmoid, hinge, ipo or robust of DPO, kto or apo_zero_unpaired of KTO; others, and several at once, are refused"),
    refused("loss_weights", "one loss is trained on: name one loss_type"),
    refused("ld_alpha", "all tokens of an answer count alike: leave it out"),
    refused("f_divergence_type", "rewards are differences of log-probabilities: leave it at reverse_kl"),
    moot("f_alpha_divergence_coef", "it is for f_divergence_type alpha_divergence"),
    honoured("label_smoothing", "label_smoothing of the task, for sigmoid and robust"),
    honoured("beta", "beta of the task"),
    refused("use_weighting", "all pairs count alike: leave it out"),
    moot("discopop_tau", "it is for loss_type discopop"),
    honoured("desirable_weight", "desirable_weight of the task"),
    honoured("undesirable_weight", "undesirable_weight of the task"),
    refused("sync_ref_model", _FOLLOWS + ": leave it out"),
    moot("ref_model_mixup_alpha", _FOLLOWS),
    moot("ref_model_sync_steps", _FOLLOWS),
)  # fmt: skip
