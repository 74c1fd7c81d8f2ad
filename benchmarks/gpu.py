"""The trainer on a GPU: attentions, losses beside the CPU's, speed, waits for the device, checkpoints, images.

Each section runs in a process of its own with a limit of 60 s. Sections of checks run side by side, with a limit of
90 s; sections that measure time run alone. The order is that of their worth. Each prints its results line by line: a
run that is cut still tells. Without a GPU all sections run at toy size, which shows only that they work.

    python benchmarks/gpu.py
    python benchmarks/gpu.py text speed-8k --folder /scratch

It needs no network, and Python 3.11, torch 2.11 and transformers 5 or later. Packages of this project that are missing
on the machine can come as wheels, made elsewhere by `make gpu-wheels`:

    python -m pip install --no-index --no-deps --target site build/gpu-wheels/*.whl
    PYTHONPATH=.:site python benchmarks/gpu.py
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import cProfile
import faulthandler
import gc
import itertools
import json
import logging
import os
import pstats
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np

LIMIT_S = 60.0  # of a section
FEWEST_S = 10.0  # for a section to begin
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
    print(f"[{SECTION}] {text}", flush=True)


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


# Datasets


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
    from lmms_stream.tools.demo.tiny_vlm import model_fields

    return model_fields(folder / "processor", positions=packing_length, hidden_size=hidden_size, num_layers=num_layers)


# Runs


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
    """A function of this file, in a process without a GPU beside this one; its result is of JSON values."""

    def __init__(self, function: str, *args: Any):
        command = [sys.executable, __file__, "--call", function, json.dumps(args)]
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


# Checks


def attentions_of(model: Mapping[str, Any]) -> list[str]:
    """The attentions that this machine has for a model, and the reasons against the others."""
    from lmms_stream.train.model.build import ModelConfig

    built: Any = ModelConfig(config=model).build()
    for name, reason in built.attention_left_out.items():
        tell(f"attention {name}: {reason}")
    return sorted(built.attention_choices, key=lambda name: name == "flex_attention")  # which is compiled: last


def with_each_attention(folder: Path, model: Mapping[str, Any], dataset: Any, reference: str) -> None:
    """Compare the losses of four steps with those on the CPU."""
    expected = OnTheCpu(reference, str(folder))
    found: dict[str, list[float]] = {}

    def run(attention: str) -> str:
        found[attention] = losses_of(folder / attention, model, dataset, steps=4, attention=attention)
        return shown(found[attention])

    for attention in ["auto", *attentions_of(model)]:
        tried(f"attention {attention}", partial(run, attention))
    of_cpu = expected.result()
    for attention, losses in found.items():
        tell(f"attention {attention}: {beside(losses, of_cpu)}")


def cpu_text(folder: str) -> list[float]:
    dataset = text_dataset(Path(folder) / "text", packing_length=tokens(2048), num_packs=32)
    return losses_of(Path(folder) / "cpu", sized(TEXT), dataset, steps=4)


def cpu_vision(folder: str) -> list[float]:
    dataset, model = small_vision(Path(folder))
    return losses_of(Path(folder) / "cpu", model, dataset, steps=4)


def small_vision(folder: Path) -> tuple[Any, dict[str, Any]]:
    dataset = image_dataset(folder / "vision", packing_length=1024, count=96, sides=(56, 225))
    return dataset, image_model(folder / "vision", packing_length=1024, hidden_size=128, num_layers=4)


def text(folder: Path) -> None:
    """A small Qwen3 with each attention."""
    model = sized(TEXT)
    dataset = text_dataset(folder / "text", packing_length=tokens(2048), num_packs=32)
    with_each_attention(folder, model, dataset, "cpu_text")


def vision(folder: Path) -> None:
    """A small Qwen2.5-VL with each attention."""
    dataset, model = small_vision(folder)
    with_each_attention(folder, model, dataset, "cpu_vision")


def settings(folder: Path) -> None:
    """Settings of a run, one at a time, each killed halfway in effect: two steps, then two more after a resume."""
    model = sized(TEXT)
    dataset = text_dataset(folder / "text", packing_length=tokens(2048), num_packs=32)
    every: dict[str, dict[str, Any]] = {
        "plain": {},
        "gradient_checkpointing": {"gradient_checkpointing": True},
        "per_device_batch 2": {"per_device_batch": 2, "global_batch": 4},
        "ema": {"ema_decay": 0.99},
        "muon": {"optim": "muon"},
        "lora": {"adapter": {"r": 8, "target_modules": ["q_proj", "v_proj"]}},
        "unsharded sums": {"fsdp": {"accumulate": "unsharded"}, "global_batch": 4},
        "kept gathered": {"fsdp": {"reshard_after_forward": False}, "global_batch": 4},
        "workers": {"num_workers": 2},
        "float32": {"bf16": False},
        "torch_compile": {"torch_compile": True, "pad_to": tokens(2048)},
    }
    for name, chosen in every.items():
        tried(name, partial(resumed, folder / name.replace(" ", "-"), model, dataset, chosen))


def resumed(folder: Path, model: Mapping[str, Any], dataset: Any, chosen: Mapping[str, Any]) -> str:
    """Compare the losses of a run of four steps with those of a run that resumes after two."""
    from lmms_stream.train.run.settings import FsdpConfig

    chosen = dict(chosen)
    if "fsdp" in chosen:
        chosen["fsdp"] = FsdpConfig(**chosen["fsdp"])
    whole = losses_of(folder / "whole", model, dataset, steps=4, **chosen)
    losses_of(folder / "halves", model, dataset, steps=2, **{**chosen, "save_steps": 0})
    halves = losses_of(folder / "halves", model, dataset, steps=4, **{**chosen, "save_steps": 0})
    apart = max(abs(one - two) for one, two in zip(whole, halves, strict=True))
    same = "equal to the bit" if whole == halves else f"apart by {apart:.2g}"
    return f"losses {whole[0]:.4f} to {whole[-1]:.4f}; resumed: {same}"


def tasks(folder: Path) -> None:
    """Tasks other than causal language modelling, and models with recurrent layers."""
    from hybrids import MODELS, SIZES

    dataset = text_dataset(folder / "text", packing_length=tokens(2048), num_packs=16)
    experts = {**sized(TEXT), "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
               "moe_intermediate_size": 256, "output_router_logits": True, "vocab_size": 512}  # fmt: skip
    tried("qwen3_moe", lambda: shown(losses_of(folder / "moe", experts, dataset, steps=4)))
    window = {**sized(TEXT), "model_type": "gemma2", "sliding_window": 256, "vocab_size": 512}
    tried("gemma2", lambda: shown(losses_of(folder / "gemma2", window, dataset, steps=4)))
    sinks = {**sized(TEXT), "model_type": "gpt_oss", "sliding_window": 128, "vocab_size": 512,
             "num_local_experts": 4, "num_experts_per_tok": 2}  # fmt: skip
    tried("gpt_oss", lambda: shown(losses_of(folder / "gpt_oss", sinks, dataset, steps=4)))
    for name in ("qwen3_5_text", "lfm2"):
        model = {"model_type": name, **SIZES, **MODELS[name]}
        tried(name, lambda name=name, model=model: shown(losses_of(folder / name, model, dataset, steps=4)))


def shown(losses: Sequence[float]) -> str:
    return f"losses {losses[0]:.4f} to {losses[-1]:.4f}"


# Measurements


def syncs(folder: Path) -> None:
    """Waits of the host for the device in a step, by the line that waits."""
    import torch
    from transformers import TrainerCallback

    model = sized(TEXT)
    dataset = text_dataset(folder / "text", packing_length=tokens(4096), num_packs=64)
    counted = 4
    first, stop = WARM_UP, WARM_UP + counted

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if has_gpu():
                torch.cuda.set_sync_debug_mode("warn" if first <= state.global_step < stop else "default")

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(folder / "syncs", model, dataset, steps=stop + 1, callbacks=[Watch()], logging_steps=2)
    places = collections.Counter(
        f"{Path(each.filename).parent.name}/{Path(each.filename).name}:{each.lineno}"
        for each in found
        if "synchroniz" in str(each.message)
    )
    listed = ", ".join(f"{count / counted:g} at {place}" for place, count in places.most_common(12))
    tell(f"{sum(places.values()) / counted:.1f} waits a step: {listed or 'none'}")


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


def speed(folder: Path, packing_length: int) -> None:
    """Packed in the trainer, packed in a bare loop, and padded in that loop: a model of half a billion parameters."""
    length = tokens(packing_length)
    model, steps = sized(HALF_BILLION), WARM_UP + (2 if is_toy() else 8)
    batch = max(2, 32_768 // packing_length)
    dataset = text_dataset(folder / "text", packing_length=length, num_packs=batch * (steps + 4))  # fmt: skip
    profile = Profile(steps)
    trainer, records = trained(
        folder / "run", model, dataset, num_workers=2, steps=steps + 3, global_batch=batch, learning_rate=1e-5,
        built_in=on_device(), callbacks=[profile.callback],
    )  # fmt: skip
    tell(f"trainer: {figures(records, steps)}")
    profile.tell()
    attention = trainer.model.config._attn_implementation
    del trainer
    gc.collect()
    bare = BareLoop(model, dataset, attention=attention, global_batch=batch, steps=steps)
    tried("bare loop, packed", lambda: bare.run(bare.packed))
    tried("bare loop, padded", lambda: bare.run(bare.padded))


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


def compiled(folder: Path) -> None:
    """Compiled blocks, packs padded to one length: half a billion parameters."""
    model, length = sized(HALF_BILLION), tokens(8192)
    steps = WARM_UP + 5
    dataset = text_dataset(folder / "text", packing_length=length, num_packs=4 * (steps + 1))
    common: dict[str, Any] = {"steps": steps, "global_batch": 4, "learning_rate": 1e-5, "pad_to": length,
                              "built_in": on_device()}  # fmt: skip
    for name, chosen in {"blocks as they are": {}, "compiled blocks": {"torch_compile": True}}.items():
        made = partial(train, folder / name.replace(" ", "-"), model, dataset, **common, **chosen)
        tried(name, lambda made=made: figures(made()))


def speed_vision(folder: Path) -> None:
    """A small Qwen2.5-VL on packs of photographs."""
    length = tokens(8192)
    dataset = image_dataset(folder / "vision", packing_length=length, count=64 if is_toy() else 600,
                            sides=(56, 112) if is_toy() else (224, 512))  # fmt: skip
    model = image_model(folder / "vision", packing_length=length, hidden_size=64 if is_toy() else 1024, num_layers=12)
    for workers in (1,) if is_toy() else (2, 8):
        made = partial(train, folder / f"run-{workers}", model, dataset, steps=WARM_UP + 6, num_workers=workers)
        tried(f"{workers} workers", lambda made=made: figures(made()))


def checkpoints(folder: Path) -> None:
    """Steps beside a save of half a billion parameters with their moments."""
    model = sized(HALF_BILLION)
    dataset = text_dataset(folder / "text", packing_length=tokens(4096), num_packs=64)
    records = train(folder / "run", model, dataset, steps=12, save_steps=6, save_total_limit=1, learning_rate=1e-5,
                    built_in=on_device())  # fmt: skip
    seconds = [record["seconds"] for record in records]
    size = sum(each.stat().st_size for each in (folder / "run" / "checkpoints").rglob("*") if each.is_file())
    others = statistics.median(seconds[WARM_UP:6])
    tell(f"a checkpoint of {size / 1e9:.2f} GB: steps take {others:.3f} s, after its save "
         f"{', '.join(f'{each:.3f}' for each in seconds[6:10])} s; records: {sorted(records[6])}")  # fmt: skip
    again = partial(train, folder / "run", model, dataset, steps=14, save_steps=0, save_total_limit=1,
                    built_in=on_device())  # fmt: skip
    tried("resumed", lambda: shown([record["loss"] for record in again()]))


def images(folder: Path) -> None:
    """Photographs of a megapixel to batches on the device."""
    import torch
    from lmms_stream.loader.loader import SOURCE, PackedLoader

    count = 24 if is_toy() else 256
    dataset = image_dataset(folder / "vision", packing_length=4096, count=count, sides=None)
    for workers in (1,) if is_toy() else (4, 12):
        loader = PackedLoader(dataset, global_batch=1, num_workers=workers, pin_memory=True, weights={SOURCE: 1.0})
        batches = iter(loader)
        for _ in range(2 * workers):
            next(batches)
        began, seen, packs = time.perf_counter(), 0, 4 if is_toy() else 60
        for batch in itertools.islice(batches, packs):
            moved = batch.to(torch.device("cuda" if has_gpu() else "cpu"))
            seen += len(moved.inputs["image_grid_thw"])
        if has_gpu():
            torch.cuda.synchronize()
        tell(f"{seen / (time.perf_counter() - began):,.0f} images/s with {workers} workers")
        del batches, loader


CHECKS = {"text": text, "vision": vision, "settings": settings, "tasks": tasks}
MEASURED: dict[str, Callable[[Path], None]] = {
    "speed-8k": partial(speed, packing_length=8192),
    "syncs": syncs,
    "checkpoints": checkpoints,
    "speed-32k": partial(speed, packing_length=32_768),
    "speed-vision": speed_vision,
    "images": images,
    "compiled": compiled,
}
SECTION = ""


def machine(folder: Path) -> None:
    """The machine, and the compilation of the project's loops, which other sections then find."""
    import torch
    import transformers
    from lmms_stream.loader.loader import PackedLoader

    device = torch.cuda.get_device_name() if has_gpu() else "no GPU: toy sizes"
    tell(
        f"{device}; Python {sys.version.split()[0]}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, NumPy {np.__version__}, {len(os.sched_getaffinity(0))} cores"
    )
    began = time.perf_counter()
    next(iter(PackedLoader(text_dataset(folder / "text", packing_length=256, num_packs=8), global_batch=2)))
    next(iter(PackedLoader(small_vision(folder)[0], global_batch=2)))
    tell(f"loops compiled in {time.perf_counter() - began:.1f} s")


class Section:
    """A section in a process of its own; its lines are printed as they come."""

    def __init__(self, name: str, folder: Path, logs: Path):
        (folder / name).mkdir()
        self.name, self.began = name, time.monotonic()
        self._log = (logs / f"{name}.log").open("w")
        command = [sys.executable, __file__, "--section", name, "--folder", str(folder / name)]
        threads = {"OMP_NUM_THREADS": "4"} if name in CHECKS else {}  # which share the cores
        self._process = subprocess.Popen(
            command,
            env={**threads, **os.environ},
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self._printing = threading.Thread(target=self._print, daemon=True)
        self._printing.start()

    def _print(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            print(line, end="", flush=True)

    def wait(self, limit_s: float) -> None:
        """Wait for the end; end the process and all that it started at the limit."""
        try:
            code = self._process.wait(max(0.1, limit_s - (time.monotonic() - self.began)))
            said = "" if code == 0 else f"exit status {code}"
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGUSR1)  # writes where it is to its log
            time.sleep(0.5)
            os.killpg(self._process.pid, 9)
            self._process.wait()
            said = f"cut after {limit_s:.0f} s"
        self._printing.join(5)
        self._log.close()
        if said:
            tail = Path(self._log.name).read_text().splitlines()[-12:]
            print(f"[{self.name}] {said}", *tail, sep="\n    ", flush=True)


def run_sections(names: Sequence[str], folder: Path, *, logs: Path, minutes: float) -> None:
    ends = time.monotonic() + 60 * minutes
    for name, group in itertools.groupby(["machine", *names], lambda name: name not in CHECKS and name):
        if (left := ends - time.monotonic()) < FEWEST_S:
            print(f"no time left for {', '.join(group)} and those after it")
            return
        sections = [Section(each, folder, logs) for each in group]
        for section in sections:
            section.wait(min(LIMIT_S if name else 1.5 * LIMIT_S, left))  # checks share the cores
        print(f"{', '.join(each.name for each in sections)}: {time.monotonic() - sections[0].began:.0f} s", flush=True)


def main() -> None:
    global SECTION
    every = [*CHECKS, *MEASURED]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(every)} (default: all)")
    parser.add_argument("--minutes", type=float, default=8.0, help="limit of all sections together")
    parser.add_argument("--folder", type=Path, help="for some GB of files (default: the system's temporary folder)")
    parser.add_argument("--logs", type=Path, help="folder to keep what each section logs (default: not kept)")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--call", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(name)s: %(message)s")
    if args.call:
        print(json.dumps(globals()[args.call[0]](*json.loads(args.call[1]))))
    elif args.section:
        SECTION = args.section
        faulthandler.register(signal.SIGUSR1)
        ({"machine": machine} | CHECKS | MEASURED)[args.section](args.folder)
    else:
        if unknown := {*args.sections} - {*every}:
            parser.error(f"unknown sections {', '.join(unknown)}: choose from {', '.join(every)}")
        if shutil.which("nvidia-smi") is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            os.environ.update(LMMS_GPU_TOY="1", OMP_NUM_THREADS="1")
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            logs = args.logs or Path(name)
            logs.mkdir(parents=True, exist_ok=True)
            run_sections(args.sections or every, Path(name), logs=logs, minutes=args.minutes)


if __name__ == "__main__":
    main()
