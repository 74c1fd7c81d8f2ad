"""What becomes of each field that TRL's DPOConfig and KTOConfig add, beside those of SFTConfig, and its default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .fields import honoured, moot, refused
from .sft_fields import ROWS as _OF_SFT

DEFAULTS: Mapping[str, Any] = {
    "disable_dropout": True,
    "precompute_ref_log_probs": False,
    "beta": 0.1,
    "label_smoothing": 0.0,
    "desirable_weight": 1.0,
    "undesirable_weight": 1.0,
}  # as TRL 1.16 has them, for arguments that are none of the two

_ALIKE = {row.name: row for row in _OF_SFT}
_FOLLOWS = "the reference stays as the run began"

ROWS = (
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
