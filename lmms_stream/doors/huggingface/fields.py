"""Effect of each field of transformers.TrainingArguments, in the order of the class in 4.57; then the fields of 5.

Only this file decides whether a field is refused or moot; `arguments` translates the honoured fields.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass
from typing import Any, Literal

# A field of transformers' or TRL's arguments, and its effect here.

Fate = Literal["honoured", "moot", "refused"]


@dataclass(frozen=True, slots=True)
class FieldRule:
    """The effect of a field.

    text: an honoured field's effect, the reason a moot field has no effect, or a refused field's reason and remedy.
    same: whether a value equals the field's default, if this is not plain from the default itself (their classes
    replace some defaults in construction).
    """

    name: str
    fate: Fate
    text: str
    same: Callable[[Any], bool] | None = None

    def is_given(self, value: Any, field: Field[Any]) -> bool:
        """Whether a value differs from the default."""
        if self.same is not None and self.same(value):
            return False
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        return bool(value != default)


def honoured(name: str, text: str) -> FieldRule:
    return FieldRule(name, "honoured", text)


def moot(name: str, text: str, same: Callable[[Any], bool] | None = None) -> FieldRule:
    return FieldRule(name, "moot", text, same)


def refused(name: str, text: str, same: Callable[[Any], bool] | None = None) -> FieldRule:
    return FieldRule(name, "refused", text, same)


_PACKS = "a pack has no padding but its own end, so samples of different lengths cost nothing"
_SHARDED = "the model is sharded with FSDP2, not copied by DDP"
_HUB = "no checkpoint is uploaded while a run goes on: trainer.push_to_hub() uploads the model, as scripts call it at the end"
_NO_HUB = "no checkpoint is uploaded (see push_to_hub)"
_LOGITS = "metrics of logits are the trainer's compute_metrics"
_TPU = "there are no TPUs here"
_COLLECTED = "the evaluation keeps sums and counts, not logits"


def _empty(value: Any) -> bool:
    return not value


def _default_accelerator(value: Any) -> bool:
    """Whether accelerate's settings are its defaults, except split_batches, which is supported."""
    from transformers.trainer_pt_utils import AcceleratorConfig

    if value is None:
        return True
    fields = value if isinstance(value, Mapping) else asdict(value)
    return bool(AcceleratorConfig(**{**fields, "split_batches": False}) == AcceleratorConfig())


ROWS = (
    honoured("output_dir", "output_dir"),
    moot("overwrite_output_dir", "a run never empties its output_dir; train(resume_from_checkpoint=…) says what is resumed"),
    moot("do_train", "scripts of transformers read it, their Trainer does not: call train()"),
    moot("do_eval", "follows from eval_strategy, as in transformers", lambda value: True),
    moot("do_predict", "scripts of transformers read it, their Trainer does not"),
    honoured("eval_strategy", "when the eval_dataset is evaluated: at steps, at the end of epochs, or only by evaluate()"),
    refused("prediction_loss_only", "an evaluation keeps predictions for compute_metrics alone: leave compute_metrics out"),
    honoured("per_device_train_batch_size", "per_device_batch: packs (samples without packing) of a rank's forward; times gradient_accumulation_steps times the ranks it is global_batch. With packing and attention sdpa or eager, which compute tokens times tokens, packs are run one after another, to the same sums"),
    moot("per_device_eval_batch_size", "the loss of an evaluation is over all tokens, whatever is evaluated at once: a pack of each rank"),
    refused("per_gpu_train_batch_size", "it is deprecated: set per_device_train_batch_size"),
    refused("per_gpu_eval_batch_size", "it is deprecated: set per_device_eval_batch_size"),
    honoured("gradient_accumulation_steps", "global_batch, see per_device_train_batch_size"),
    moot("eval_accumulation_steps", _COLLECTED),
    honoured("eval_delay", "steps or epochs before the first evaluation"),
    moot("torch_empty_cache_steps", "packs have one length, so the allocator's cache does not grow"),
    honoured("learning_rate", "learning_rate"),
    honoured("weight_decay", "weight_decay, of matrices alone"),
    honoured("adam_beta1", "optim_args: betas"),
    honoured("adam_beta2", "optim_args: betas"),
    honoured("adam_epsilon", "optim_args: eps"),
    honoured("max_grad_norm", "max_grad_norm; 0 does not clip, as in transformers"),
    honoured("num_train_epochs", "num_train_epochs; of a fraction the steps are counted from the plan"),
    honoured("max_steps", "max_steps; above 0 it wins over num_train_epochs, as in transformers"),
    honoured("lr_scheduler_type", "lr_scheduler_type"),
    honoured("lr_scheduler_kwargs", "what the schedule takes besides"),
    honoured("warmup_ratio", "warmup, below 1; with max_steps rounded up to steps, as in transformers 4"),
    honoured("warmup_steps", "warmup, before warmup_ratio; below 1 a share of the run, as in transformers 5"),
    honoured("log_level", "the level of transformers' loggers; the run's own is that of the logger lmms_stream"),
    honoured("log_level_replica", "the same on other ranks"),
    moot("log_on_each_node", "rank 0 logs"),
    moot("logging_dir", "records go to train_log.jsonl and tensorboard/ in output_dir",
         lambda value: value is None or f"{os.sep}runs{os.sep}" in str(value)),
    honoured("logging_strategy", "when records are written: at steps, at the end of epochs, or never"),
    honoured("logging_first_step", "whether the first step is a record"),
    honoured("logging_steps", "logging_steps; below 1 a share of the run, as in transformers"),
    moot("logging_nan_inf_filter", "a step whose gradients are not finite is skipped and counted, and told in the log"),
    honoured("save_strategy", "when checkpoints are saved: at steps, at the end of epochs, at the best evaluation, or never"),
    honoured("save_steps", "save_steps; below 1 a share of the run, as in transformers"),
    honoured("save_total_limit", "save_total_limit"),
    refused("save_safetensors", "weights are exported as safetensors alone: leave it True"),
    moot("save_on_each_node", "checkpoints lie in one folder that all nodes see, each rank writing its part"),
    refused("save_only_model", "a checkpoint without its optimizer could not be resumed: export it, or call save_model, for the model alone"),
    moot("restore_callback_states_from_checkpoint", "callbacks with a state are always restored"),
    refused("no_cuda", "it is deprecated: set use_cpu"),
    honoured("use_cpu", "on a machine without CUDA nothing; on one with, CUDA_VISIBLE_DEVICES='' has to be set before the script starts"),
    refused("use_mps_device", "Apple's GPUs are not supported: leave it out"),
    honoured("seed", "seed: of what the model draws, of dropout"),
    honoured("data_seed", "the seed of the epoch order (default: seed)"),
    refused("jit_mode_eval", "evaluations run the model as it is trained: set torch_compile"),
    honoured("bf16", "bf16: computation in bfloat16, weights and optimizer in float32"),
    refused("fp16", "its gradients need scaling, which is not here: set bf16"),
    moot("fp16_opt_level", "it is for fp16"),
    refused("half_precision_backend", "bf16 is torch's own: leave it auto"),
    moot("bf16_full_eval", "evaluations compute as training does"),
    refused("fp16_full_eval", "evaluations compute as training does: set bf16"),
    honoured("tf32", "tf32; transformers sets torch's own switch when the arguments are made, too"),
    moot("local_rank", "torchrun's environment says it", lambda value: True),
    refused("ddp_backend", "the process group is gloo on CPUs, and on GPUs nccl with gloo: leave it out", lambda value: value in ("gloo", "nccl", "cpu:gloo,cuda:nccl")),
    refused("tpu_num_cores", _TPU + ": leave it out"),
    moot("tpu_metrics_debug", _TPU),
    refused("debug", "torch.autograd.set_detect_anomaly, or the trainer's profile, are the tools here: leave it out", _empty),
    refused("dataloader_drop_last", "a short last step is filled up with empty packs, so no sample is lost: leave it False"),
    honoured("eval_steps", "eval_steps; below 1 a share of the run, as in transformers"),
    honoured("dataloader_num_workers", "num_workers"),
    moot("dataloader_prefetch_factor", "workers read a fixed number of packs ahead"),
    refused("past_index", "the model keeps no state between packs: leave it out"),
    moot("run_name", "WANDB_NAME names the run of Weights & Biases"),
    moot("disable_tqdm", "a bar is shown on a terminal alone", lambda value: True),
    moot("remove_unused_columns", "columns that no tokens are made of are never read"),
    refused("label_names", "the targets are the batch's labels: leave it out", lambda value: value in (None, [], ["labels"])),
    honoured("load_best_model_at_end", "the weights of the best checkpoint are loaded after the last step"),
    honoured("metric_for_best_model", "what the best checkpoint is told by"),
    honoured("greater_is_better", "whether more of it is better"),
    moot("ignore_data_skip", "a run resumes at its cursor at once, without reading what came before"),
    refused("fsdp", "the model is sharded with FSDP2 in any case, its parameters never offloaded: leave fsdp out", lambda value: not value or {str(getattr(each, "value", each)) for each in value} <= {"full_shard", "auto_wrap"}),
    refused("fsdp_min_num_params", "blocks are sharded one by one: leave it out"),
    refused("fsdp_config", "blocks are sharded one by one, as the model names them: leave it out",
            lambda value: not any((value or {}).values())),
    refused("fsdp_transformer_layer_cls_to_wrap", "the model names its blocks: leave it out, or give a TrainConfig with fsdp.wrap"),
    refused("accelerator_config", "accelerate does not run the loop: leave all but split_batches out", _default_accelerator),
    refused("parallelism_config", "ranks that share a model or its tokens are settings of a run: leave it out, or give a TrainConfig with tensor_parallel, sequence_parallel or shard_ranks"),
    refused("deepspeed", "the model is sharded with FSDP2: leave deepspeed out"),
    refused("label_smoothing_factor", "the loss is the cross entropy of the targets: give a compute_loss_func"),
    honoured("optim", "optim, where the name is known"),
    honoured("optim_args", "optim_args, as name=value,…"),
    refused("adafactor", "it is deprecated: set optim"),
    moot("group_by_length", _PACKS),
    moot("length_column_name", _PACKS),
    honoured("report_to", "report_to of TensorBoard, Weights & Biases, prometheus and otlp; others are named in a warning, and theirs are callbacks to pass"),
    moot("project", "it is Trackio's"),
    moot("trackio_space_id", "it is Trackio's"),
    moot("ddp_find_unused_parameters", _SHARDED + "; parameters that a rank did not use have gradients of 0"),
    moot("ddp_bucket_cap_mb", _SHARDED),
    moot("ddp_broadcast_buffers", _SHARDED),
    moot("dataloader_pin_memory", "memory is pinned where there is a GPU", lambda value: True),
    moot("dataloader_persistent_workers", "workers stay for the whole run"),
    moot("skip_memory_metrics", "memory is in each record"),
    moot("use_legacy_prediction_loop", "there is one evaluation"),
    moot("push_to_hub", _HUB),
    honoured("resume_from_checkpoint", "as in transformers, for scripts: train(resume_from_checkpoint=args.resume_from_checkpoint). train() alone begins anew, and is refused where output_dir has checkpoints"),
    honoured("hub_model_id", "of trainer.push_to_hub()"),
    moot("hub_strategy", _NO_HUB, lambda value: str(getattr(value, "value", value)) == "every_save"),
    honoured("hub_token", "of trainer.push_to_hub()"),
    honoured("hub_private_repo", "of trainer.push_to_hub()"),
    moot("hub_always_push", _NO_HUB),
    honoured("hub_revision", "of trainer.push_to_hub()"),
    honoured("gradient_checkpointing", "gradient_checkpointing, block by block"),
    honoured("gradient_checkpointing_kwargs", "use_reentrant, of which False is what is done; others are refused"),
    refused("include_inputs_for_metrics", _LOGITS + ": it is given predictions and labels alone"),
    refused("include_for_metrics", _LOGITS + ": it is given predictions and labels alone", _empty),
    moot("eval_do_concat_batches", _COLLECTED),
    refused("fp16_backend", "bf16 is torch's own: leave it auto"),
    moot("push_to_hub_model_id", _NO_HUB),
    moot("push_to_hub_organization", _NO_HUB),
    moot("push_to_hub_token", _NO_HUB),
    moot("_n_gpu", "a process has one device", lambda value: True),
    refused("mp_parameters", "it is SageMaker's: leave it out"),
    refused("auto_find_batch_size", "a step is the same global batch from its start to its end: set per_device_train_batch_size"),
    honoured("full_determinism", "transformers' enable_full_determinism with this seed"),
    refused("torchdynamo", "it is deprecated: set torch_compile"),
    moot("ray_scope", "there is no search for hyperparameters"),
    honoured("ddp_timeout", "timeout_s"),
    honoured("torch_compile", "torch_compile, block by block"),
    refused("torch_compile_backend", "blocks are compiled with inductor: leave it out", lambda value: value in (None, "inductor")),
    refused("torch_compile_mode", "blocks are compiled in torch's default mode: leave it out", lambda value: value in (None, "default")),
    moot("include_tokens_per_second", "each record has perf/tokens_per_s"),
    moot("include_num_input_tokens_seen", "each record has tokens_seen", lambda value: value in (False, "no")),
    refused("neftune_noise_alpha", "no noise is added to embeddings: leave it out, or override create_model"),
    refused("optim_target_modules", "it is GaLore's and APOLLO's: leave it out"),
    moot("batch_eval_metrics", _COLLECTED),
    honoured("eval_on_start", "whether there is an evaluation before the first step"),
    honoured("use_liger_kernel", "use_liger_kernel of the model, where liger-kernel is installed"),
    refused("liger_kernel_config", "liger's own defaults are taken: leave it out"),
    moot("eval_use_gather_object", _COLLECTED),
    refused("average_tokens_across_devices", "the loss of a step is its sum over the global batch by the loss tokens of the global batch: leave it True"),
    honoured("activation_checkpointing", "gradient_checkpointing, block by block"),
    honoured("activation_checkpointing_kwargs", "use_reentrant, of which False is what is done; others are refused"),
    honoured("train_sampling_strategy", "sequential keeps the order of the rows, in packs of next_fit; group_by_length is random: "+_PACKS),
    moot("dataloader_in_order", "steps come in the order of the plan"),
    moot("dataloader_multiprocessing_context", "workers are started as is safe beside the threads of a run"),
    moot("ddp_static_graph", _SHARDED),
    moot("enable_jit_checkpoint", "a run that is told to stop saves a checkpoint in any case"),
    moot("trackio_bucket_id", "it is Trackio's"),
    moot("trackio_static_space_id", "it is Trackio's"),
    moot("use_cache", "no keys and values are kept in training"),
)  # fmt: skip


# Fields added by TRL's SFTConfig, DPOConfig and KTOConfig, and their defaults in TRL 1.16: for arguments of another class,
# because TRL itself makes an SFTConfig from plain TrainingArguments.

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
