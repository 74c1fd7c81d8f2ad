"""Datasets, runs of the trainer and a bare loop for the sections of gpu.py, at toy size without a GPU."""

from __future__ import annotations

import contextlib
import cProfile
import itertools
import json
import logging
import os
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np

LIMIT_S = 60.0  # of a section
WARM_UP = 3  # steps that are not counted
TEXT: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 32_768,
}
HALF_BILLION: dict[str, Any] = {  # the sizes of Qwen2.5-0.5B
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
TOY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
       "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
WORDS = 64  # tokens that samples are made of: a few steps learn how often each comes


def tell(text: str) -> None:
    print(text, flush=True)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def is_toy() -> bool:
    """Whether the machine has no GPU; its variable is set for all processes."""
    return "LMMS_GPU_TOY" in os.environ


def sized(config: Mapping[str, Any]) -> dict[str, Any]:
    """The model, or a toy of its kind without a GPU."""
    return {**config, **TOY} if is_toy() else dict(config)


def tokens(length: int) -> int:
    return length // 16 if is_toy() else length


def text_dataset(folder: Path, *, packing_length: int, num_packs: int) -> Any:
    """Packs of chats of random tokens: lengths with a median of 350."""
    from data import sample_lengths, write_tokens
    from lmms_stream.mds.packed import PackedStreamingDataset
    from lmms_stream.plan.packing import PackingConfig
    from lmms_stream.processors.text import TokensProcessor

    if not folder.exists():
        lengths = sample_lengths("chat", num_packs * packing_length // 500 + 64, limit=packing_length)
        write_tokens(folder, np.asarray(lengths), shard_bytes=1 << 22, vocabulary=WORDS)
    packing = PackingConfig(packing_length=packing_length)
    return PackedStreamingDataset(folder, processor=TokensProcessor(), packing=packing)


def image_dataset(folder: Path, *, packing_length: int, count: int, sides: tuple[int, int] | None) -> Any:
    """Packs of chats with an image each. sides: limits of an image's sides in pixels; None: 1008 each."""
    from lmms_stream.mds.measuring import index_dataset
    from lmms_stream.mds.packed import PackedStreamingDataset
    from lmms_stream.plan.packing import PackingConfig
    from lmms_stream.processors.multimodal import MultimodalProcessor
    from photographs import save_tiny_processor, stored_chats, varied_chats, write_mds

    if not folder.exists():
        save_tiny_processor(folder / "processor")
        answers = np.clip(np.random.default_rng(0).lognormal(np.log(60), 0.9, 1000), 4, 400).astype(int).tolist()
        chats = stored_chats(count) if sides is None else varied_chats(count, sides=sides, answers=answers)
        write_mds(folder / "chats", chats, shard_bytes=4_000_000)
    processor = MultimodalProcessor.from_pretrained(str(folder / "processor"), image_max_pixels=1008 * 1008)
    index_dataset(str(folder / "chats"), processor, num_workers=1)
    packing = PackingConfig(packing_length=packing_length)
    return PackedStreamingDataset(folder / "chats", processor=processor, packing=packing)


def image_model(folder: Path, *, packing_length: int, hidden_size: int, num_layers: int) -> dict[str, Any]:
    from lmms_stream.tools.demo.vision import model_fields

    return model_fields(folder / "processor", positions=packing_length, hidden_size=hidden_size, num_layers=num_layers)


def on_device() -> Any:
    """Let models be built on the GPU: random weights of half a billion parameters take a core 10 s."""
    import torch

    return torch.device("cuda") if has_gpu() else contextlib.nullcontext()


def trained(
    output: Path, model: Mapping[str, Any], dataset: Any, *, steps: int, attention: Any = "auto", **others: Any
) -> tuple[Any, list[dict[str, Any]]]:
    """A trainer at the end of its run, and the records of its steps."""
    from lmms_stream import FSDP2SFTTrainer
    from lmms_stream.train.model.build import ModelConfig
    from lmms_stream.train.run.settings import TrainConfig

    adapter, callbacks = others.pop("adapter", None), others.pop("callbacks", ())
    built_in = others.pop("built_in", contextlib.nullcontext())
    settings = {"global_batch": 2, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "num_workers": 0}
    config = TrainConfig(**{**settings, "output_dir": str(output), "max_steps": steps, "save_steps": "no", **others})
    with built_in:
        built = ModelConfig(config=model, attention=attention, adapter=adapter).build()
    trainer = FSDP2SFTTrainer(built, config, dataset, callbacks=callbacks)
    trainer.train()
    lines = (output / "train_log.jsonl").read_text().splitlines()
    return trainer, [record for record in map(json.loads, lines) if "loss" in record]


def train(*args: Any, **settings: Any) -> list[dict[str, Any]]:
    """The records of a run's steps."""
    return trained(*args, **settings)[1]


def losses_of(output: Path, *args: Any, **settings: Any) -> list[float]:
    return [record["loss"] for record in train(output, *args, **settings)]


class OnTheCpu:
    """A function of gpu_sections.py in another process, without a GPU; arguments and result are JSON values."""

    def __init__(self, function: str, *args: Any):
        command = [
            sys.executable,
            str(Path(__file__).with_name("gpu_sections.py")),
            "--call",
            function,
            json.dumps(args),
        ]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def result(self) -> Any:
        said, errors = self._process.communicate(timeout=2 * LIMIT_S)
        if self._process.returncode:
            raise RuntimeError(f"on the CPU: {errors[-800:]}")
        return json.loads(said.splitlines()[-1])


def tried(name: str, act: Callable[[], str]) -> None:
    """Tell the result of a part, or its error in a line."""
    began = time.perf_counter()
    try:
        said = act()
    except Exception as error:  # the other parts still run
        logging.getLogger("gpu").exception("%s", name)
        said = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    tell(f"{name}: {said} ({time.perf_counter() - began:.1f} s)")


def beside(ours: Sequence[float], theirs: Sequence[float]) -> str:
    apart = max(abs(one - two) / two for one, two in zip(ours, theirs, strict=True))
    return f"losses at most {apart:.2%} from the CPU's in float32"


def shown(losses: Sequence[float]) -> str:
    return f"losses {losses[0]:.4f} to {losses[-1]:.4f}"


class Profile:
    """Where the time of steps goes: of step `first` by operator, of the next by function of Python."""

    def __init__(self, first: int):
        import torch
        from transformers import TrainerCallback

        kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if has_gpu() else [])]
        self.operators, self.functions = torch.profiler.profile(activities=kinds), cProfile.Profile()
        steps = {
            first: self.operators.start,
            first + 1: lambda: (self.operators.stop(), self.functions.enable()),
            first + 2: self.functions.disable,
        }

        class Watch(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                steps.get(state.global_step, lambda: None)()

        self.callback = Watch()

    def tell(self) -> None:
        averages = self.operators.key_averages()
        for order in dict.fromkeys(("self_device_time_total" if has_gpu() else "self_cpu_time_total",
                                    "self_cpu_time_total")):  # fmt: skip
            print(averages.table(sort_by=order, row_limit=20, max_name_column_width=60), file=sys.stderr)
            top = sorted(averages, key=lambda each: -getattr(each, order))[:6]
            total = sum(getattr(each, order) for each in averages)
            tell(f"{order} of a step {total / 1e3:.0f} ms: " + ", ".join(
                f"{each.key[:40]} {getattr(each, order) / 1e3:.0f} ms in {each.count}" for each in top))  # fmt: skip
        for order in ("tottime", "cumulative"):
            pstats.Stats(self.functions, stream=sys.stderr).sort_stats(order).print_stats(45)


def figures(records: Sequence[Mapping[str, Any]], stop: int | None = None) -> str:
    """Medians of the steps after the warm-up. stop: the first that is not counted."""
    counted = records[WARM_UP:stop]

    def median(name: str) -> float:
        return statistics.median(record.get(name, 0.0) for record in counted)

    return (
        f"{median('perf/tokens_per_s'):,.0f} tokens/s, MFU {median('perf/mfu'):.1%}, waiting "
        f"{median('data/wait_share'):.2%}, peak {max(r.get('memory/cuda_peak_mib', 0) for r in counted) / 1024:.1f} GiB"
    )


class BareLoop:
    """A loop of forward, backward, clipping and update, sharded by FSDP2, on batches that are on the device."""

    def __init__(self, config: Mapping[str, Any], dataset: Any, *, attention: Any, global_batch: int, steps: int):
        import torch
        from lmms_stream.loader.loader import PackedLoader
        from lmms_stream.train.model.build import ModelConfig
        from lmms_stream.train.model.model import PackedModel
        from lmms_stream.train.model.sharding import blocks_to_shard
        from lmms_stream.train.run.distributed import init_distributed
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
        from vision_training import padded_losses

        _, self.device = init_distributed(60)
        torch.set_float32_matmul_precision("high")
        with on_device():
            self.model = PackedModel(ModelConfig(config=config, attention=attention).build().to(self.device))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if has_gpu() else None, reduce_dtype=torch.float32)
        for block in blocks_to_shard(self.model.model):
            fully_shard(block, mp_policy=policy)
        fully_shard(self.model, mp_policy=policy)
        self.model.of_rows = MethodType(padded_losses, self.model)
        register_fsdp_forward_method(self.model, "of_rows")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        loader = PackedLoader(dataset, global_batch=global_batch)
        every = [*itertools.islice(loader, steps * global_batch)]
        self.steps = [every[start : start + global_batch] for start in range(0, len(every), global_batch)]

    def packed(self, batch: Any) -> Any:
        return self.model(batch.to(self.device))[0]

    def padded(self, batch: Any) -> Any:
        from training import pad

        return self.model.of_rows({name: values.to(self.device) for name, values in pad(batch).items()})

    def run(self, losses_of_batch: Callable[[Any], Any]) -> str:
        import torch

        if losses_of_batch == self.padded:
            self.model.model.set_attn_implementation("sdpa")
        cuda = has_gpu()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        rates = []
        for step in self.steps:
            count = sum(batch.num_loss_tokens for batch in step)
            began = time.perf_counter()
            for batch in step:
                (losses_of_batch(batch).sum() / count).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if cuda:
                torch.cuda.synchronize()
            rates.append(sum(batch.num_tokens for batch in step) / (time.perf_counter() - began))
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
        attention = self.model.model.config._attn_implementation
        return f"{statistics.median(rates[WARM_UP:]):,.0f} tokens/s with {attention}, peak {peak:.1f} GiB"
