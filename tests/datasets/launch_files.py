"""The launch files that LMMS Engine ships, by their keys and values; paths are below a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DATASET: dict[str, Any] = {  # as their launcher writes every field down
    "extra_kwargs": {}, "dataset_format": "yaml", "datasets": None, "shuffle": True, "eval_dataset_path": None,
    "object_storage": "none", "bucket_name": None, "packing": False, "packing_strategy": "first_fit",
    "packing_length": 8192, "filter_overlong": True, "filter_overlong_workers": 8, "max_length": None,
    "video_backend": "qwen_vl_utils",
}  # fmt: skip
VIDEO: dict[str, Any] = {
    "video_sampling_strategy": "fps", "video_max_pixels": 50176, "video_max_frames": 512, "frame_num": 64, "fps": 1,
}  # fmt: skip
MODEL: dict[str, Any] = {
    "extra_kwargs": {}, "load_from_config": None, "attn_implementation": "flash_attention_2", "overwrite_config": None,
    "monkey_patch_kwargs": None, "model_type": None, "torch_dtype": "bfloat16",
}  # fmt: skip
FEW: dict[str, Any] = {
    "per_device_train_batch_size": 1, "learning_rate": 1e-6, "weight_decay": 0.0, "gradient_checkpointing": True,
    "num_train_epochs": 1, "save_steps": 100, "save_total_limit": 1, "report_to": "none", "warmup_ratio": 0.0,
    "run_name": "debug", "eval_strategy": "no", "logging_steps": 1, "group_by_length": False, "bf16": True,
    "dataloader_num_workers": 0, "lr_scheduler_type": "constant", "use_liger_kernel": True, "use_rmpad": True,
    "fsdp2": True, "sp_ulysses_degree": 1, "torch_empty_cache_steps": 10, "enable_profiler": False,
    "profiler_config": {"start_step": 1, "end_step": 3},
    "fsdp_config": {"transformer_layer_cls_to_wrap": ["ABlockThatIsNotHere"], "reshard_after_forward": False},
}  # fmt: skip
ALL = FEW | {
    "overwrite_output_dir": False, "do_train": False, "per_gpu_train_batch_size": None, "jit_mode_eval": False,
    "half_precision_backend": "auto", "fp16_backend": "auto", "no_cuda": False, "past_index": -1, "tf32": None,
    "torch_empty_cache_steps": None, "use_mps_device": False, "mp_parameters": "", "torchdynamo": None,
    "save_safetensors": True, "logging_dir": "./output/runs/x", "ray_scope": "last", "adafactor": False, "debug": [],
    "fsdp": [], "fsdp_min_num_params": 0, "include_inputs_for_metrics": False, "use_muon": None, "freeze_modules": None,
    "reduce_dtype": "bfloat16", "output_dtype": "bfloat16", "print_batch_input_steps": 5, "report_to": [],
    "optim": "adamw_torch_fused", "lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {}, "ep_degree": None,
    "accelerator_config": {
        "split_batches": False, "dispatch_batches": None, "even_batches": True, "use_seedable_sampler": True,
        "non_blocking": False, "gradient_accumulation_kwargs": None,
    },
    "fsdp_config": FEW["fsdp_config"] | {"min_num_params": 0, "xla": False, "xla_fsdp_v2": False,
                                         "xla_fsdp_grad_ckpt": False},
}  # fmt: skip
SLOW_FAST = {"faster_token_stride": 10, "mm_spatial_pool_stride": 2, "mm_spatial_pool_mode": "bilinear"}
LIGER = {
    "patch_type": ["liger"], "use_rmpad": True, "rope": False, "swiglu": False, "cross_entropy": False,
    "fused_linear_cross_entropy": True, "rms_norm": False,
}  # fmt: skip


def launch_files(build: Path) -> dict[str, Any]:
    """Name -> a launch file of theirs, with paths below build."""
    pictures = [{"path": f"{build}/pictures.parquet", "data_folder": str(build), "data_type": "parquet"}]
    texts = [{"path": f"{build}/texts.parquet", "data_folder": "", "data_type": "parquet"}]
    omni_media = {"image_max_pixels": 602112, "image_min_pixels": 28800}
    omni = {
        "dataset_config": {
            "dataset_type": "qwen_omni", "dataset_format": "json", "dataset_path": f"{build}/pictures.jsonl",
            "processor_config": {
                "processor_name": f"{build}/omni", "processor_type": "Qwen2_5OmniProcessor",
                "extra_kwargs": {"audio_max_length": 60, "use_audio_in_video": True, "video_max_pixels": 602112,
                                 "video_min_pixels": 28800, **omni_media},
            },
            "extra_kwargs": {"use_audio_in_video": True}, "video_backend": "qwen_omni_utils",
            "video_sampling_strategy": "fps", "fps": 1,
        },
        "model_config": {"load_from_pretrained_path": f"{build}/omni", "attn_implementation": "flash_attention_2",
                         "model_type": "qwen2_5_omni", "torch_dtype": "bfloat16"},
    }  # fmt: skip
    evaluates = FEW | {"eval_strategy": "steps", "max_steps": 5, "save_steps": 1}
    moe = {
        "dataset_config": {
            "dataset_type": "vision_iterable", "dataset_format": "yaml", "datasets": texts, "packing": False,
            "processor_config": {"processor_name": f"{build}/moe", "processor_type": "qwen2"},
            "packing_strategy": "first_fit", "packing_length": 10240, "filter_overlong": True,
        },
        "model_config": {"load_from_pretrained_path": f"{build}/moe", "attn_implementation": "flash_attention_2",
                         "monkey_patch_kwargs": LIGER},
    }  # fmt: skip

    def streamed(kind: str, name: str, processor: dict[str, Any], model: dict[str, Any] = MODEL) -> dict[str, Any]:
        listed = "list.yaml" if "qwen3" in kind and processor["processor_type"] != "qwen2" else "texts.yaml"
        return {
            "trainer_type": "fsdp2_trainer",
            "dataset_config": {**DATASET, **VIDEO, "dataset_path": f"{build}/{listed}", "dataset_type": kind,
                               "processor_config": processor},
            "model_config": {**model, "load_from_pretrained_path": f"{build}/{name}"},
            "trainer_args": ALL | {"max_steps": 1000},
            "extra_kwargs": None,
        }  # fmt: skip

    without_type = {name: value for name, value in MODEL.items() if name not in ("model_type", "torch_dtype")}
    named = {"processor_name": f"{build}/qwen3_vl", "processor_type": "qwen3_vl"}
    return {
        "text": streamed("qwen3_vl_iterable", "text",
                         {"processor_name": f"{build}/text", "processor_type": "qwen2"}),
        "qwen3_vl": streamed("qwen3_vl_iterable", "qwen3_vl", named, without_type),
        "qwen3_vl without a processor": streamed(
            "qwen3_vl_iterable", "qwen3_vl", {"processor_name": "", "processor_type": "nit"}, without_type),
        "qwen3_5": streamed("qwen3_5_iterable", "qwen3_5",
                            {"processor_name": f"{build}/qwen3_5", "processor_type": "qwen3_5"}, without_type),
        "llava": {
            "trainer_type": "fsdp2_trainer",
            "dataset_config": {"dataset_type": "vision_iterable", "dataset_format": "yaml", "datasets": pictures,
                               "processor_config": {"processor_name": f"{build}/llava", "processor_type": "llava"},
                               "video_backend": "qwen_vl_utils"},
            "model_config": {"load_from_pretrained_path": f"{build}/llava",
                             "attn_implementation": "flash_attention_2"},
            "trainer_args": FEW | {"max_steps": 1, "group_by_length": True, "print_batch_input_steps": -1},
        },
        "experts": {"trainer_type": "fsdp2_trainer", **moe, "trainer_args": FEW | {"max_steps": 9, "ep_degree": 1}},
        "experts, older layout": [{"type": "trainer", "config": {
            "trainer_type": "fsdp2_trainer", **moe, **FEW, "fsdp2": False, "ep_degree": 1}}],
        "omni": {"trainer_type": "fsdp2_trainer", **omni, "trainer_args": evaluates},
        "omni, older layout": [{"type": "trainer", "config": {"trainer_type": "fsdp2_trainer", **omni, **evaluates}}],
        "qwen2_5_vl": {
            "trainer_type": "fsdp2_trainer",
            "dataset_config": {"dataset_type": "vision", "dataset_format": "yaml", "datasets": pictures,
                               "processor_config": {"processor_name": f"{build}/qwen2_5_vl",
                                                    "processor_type": "qwen2_5_vl"},
                               "packing": True, "packing_strategy": "first_fit", "packing_length": 16384},
            "model_config": {"load_from_pretrained_path": f"{build}/qwen2_5_vl",
                             "attn_implementation": "flash_attention_2"},
            "trainer_args": FEW | {"freeze_modules": ["visual"], "group_by_length": True},
        },
        "sit": {
            "trainer_type": "sit_trainer",
            "dataset_config": {"dataset_type": "vision", "dataset_format": "yaml",
                               "processor_config": {"processor_type": "sit", "extra_kwargs": {"image_size": 256}},
                               "datasets": [{"path": f"{build}/images.parquet", "data_type": "parquet"}]},
            "model_config": {"load_from_config": {
                "model_type": "sit", "input_size": 32, "hidden_size": 32, "depth": 2, "num_heads": 2, "num_classes": 10,
                "mlp_ratio": 4.0, "learn_sigma": True, "vae_path": f"{build}/vae", "path_type": "Linear",
                "prediction": "velocity", "loss_weight": None, "cfg_scale": 1.0}},
            "trainer_args": {"per_device_train_batch_size": 8, "learning_rate": 1e-4, "max_steps": -1, "bf16": True,
                             "num_train_epochs": 100, "warmup_steps": 1000, "tf32": True, "fsdp2": True,
                             "fsdp_config": {"transformer_layer_cls_to_wrap": ["SiTBlock"]}, "logging_steps": 1,
                             "report_to": ["tensorboard"], "remove_unused_columns": False},
        },
        "masked diffusion": {
            "trainer_type": "dllm_trainer",
            "dataset_config": {"dataset_type": "fineweb_edu", "dataset_format": "hf_dataset",
                               "dataset_path": f"{build}/documents", "packing_length": 64,
                               "processor_config": {"processor_name": f"{build}/text", "processor_type": "qwen3"}},
            "model_config": {"attn_implementation": "sdpa", "load_from_config": {
                "model_type": "qwen3_dllm",
                "config": {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                           "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "use_cache": False}}},
            "trainer_args": {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "weight_decay": 0.01,
                             "gradient_accumulation_steps": 2, "gradient_checkpointing": True, "max_steps": 10,
                             "save_steps": 100, "warmup_steps": 1000, "accelerator_config": {"split_batches": True},
                             "logging_steps": 1},
        },
        "llava, slow and fast frames": {
            "trainer_type": "fsdp2_trainer",
            "dataset_config": {
                **DATASET, "video_sampling_strategy": "fps", "frame_num": 16, "fps": 1, "dataset_type": "llava_video",
                "dataset_format": "parquet", "dataset_path": f"{build}/elsewhere/*.parquet", "video_backend": "decord",
                "datasets": [{"path": f"{build}/films.json", "data_folder": str(build), "data_type": "json"}],
                "processor_config": {"processor_name": f"{build}/llava", "processor_type": "llava_video"},
                "extra_kwargs": {"data_folder": "/elsewhere", "frames_upbound": 4, "force_sample": True,
                                 "add_time_instruction": True, **SLOW_FAST},
            },
            "model_config": {**MODEL, "load_from_pretrained_path": f"{build}/llava", "model_type": "llava_onevision",
                             "monkey_patch_kwargs": {"patch_type": ["video"], **SLOW_FAST}},
            "trainer_args": ALL | {"max_steps": -1, "dataloader_drop_last": True, "remove_unused_columns": False,
                                   "optim": "adamw_torch", "torch_compile": True, "torch_compile_backend": "inductor",
                                   "tf32": True, "report_to": ["tensorboard", "wandb"]},
            "extra_kwargs": None,
        },
    }  # fmt: skip
