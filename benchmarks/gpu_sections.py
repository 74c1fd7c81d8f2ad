"""The sections of gpu.py, each a function of a folder that prints its results.

python benchmarks/gpu_sections.py NAME FOLDER
"""

from __future__ import annotations

import collections
import faulthandler
import gc
import itertools
import json
import logging
import os
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gpu_runs import (
    HALF_BILLION,
    TEXT,
    WARM_UP,
    BareLoop,
    OnTheCpu,
    Profile,
    beside,
    figures,
    has_gpu,
    image_dataset,
    image_model,
    is_toy,
    losses_of,
    on_device,
    shown,
    sized,
    tell,
    text_dataset,
    tokens,
    train,
    trained,
    tried,
)


def attentions_of(model: Mapping[str, Any]) -> list[str]:
    """The attentions that this machine has for a model, and the reasons against the others."""
    from lmms_stream.train.model.build import ModelConfig

    built: Any = ModelConfig(config=model).build()
    for name, reason in built.attention_left_out.items():
        tell(f"attention {name}: {reason}")
    return sorted(built.attention_choices, key=lambda name: name == "flex_attention")  # which is compiled: last


def with_each_attention(folder: Path, *, kind: str) -> None:
    """Train a small model of a kind (text: Qwen3, vision: Qwen2.5-VL) with each attention; compare with the CPU."""
    expected = OnTheCpu("losses_on_the_cpu", kind, str(folder))
    dataset, model = SMALL[kind](folder)
    found: dict[str, list[float]] = {}

    def run(attention: str) -> str:
        found[attention] = losses_of(folder / attention, model, dataset, steps=4, attention=attention)
        return shown(found[attention])

    for attention in ["auto", *attentions_of(model)]:
        tried(f"attention {attention}", partial(run, attention))
    of_cpu = expected.result()
    for attention, losses in found.items():
        tell(f"attention {attention}: {beside(losses, of_cpu)}")


def losses_on_the_cpu(kind: str, folder: str) -> list[float]:
    own = Path(folder) / "cpu"  # the process beside this one writes its own dataset
    own.mkdir()
    dataset, model = SMALL[kind](own)
    return losses_of(own / "run", model, dataset, steps=4)


def small_text(folder: Path) -> tuple[Any, dict[str, Any]]:
    return text_dataset(folder / "text", packing_length=tokens(2048), num_packs=32), sized(TEXT)


def small_vision(folder: Path) -> tuple[Any, dict[str, Any]]:
    dataset = image_dataset(folder / "vision", packing_length=1024, count=96, sides=(56, 225))
    return dataset, image_model(folder / "vision", packing_length=1024, hidden_size=128, num_layers=4)


SMALL = {"text": small_text, "vision": small_vision}


def settings(folder: Path) -> None:
    """Settings of a run, one at a time: four steps, and two steps followed by two more after a resume."""
    dataset, model = small_text(folder)
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


def speed(folder: Path, packing_length: int) -> None:
    """Packed in the trainer, packed in a bare loop, and padded in that loop: a model of half a billion parameters."""
    length = tokens(packing_length)
    model, steps = sized(HALF_BILLION), WARM_UP + (2 if is_toy() else 8)
    batch = max(2, 32_768 // packing_length)
    dataset = text_dataset(folder / "text", packing_length=length, num_packs=batch * (steps + 4))
    profile = Profile(steps)
    trainer, records = trained(
        folder / "run", model, dataset, num_workers=2, steps=steps + 3, global_batch=batch, learning_rate=1e-5,
        built_in=on_device(), callbacks=[profile.callback],
    )  # fmt: skip
    tell(f"trainer: {figures(records, steps)}")
    attention = trainer.model.config._attn_implementation
    del trainer
    gc.collect()
    bare = BareLoop(model, dataset, attention=attention, global_batch=batch, steps=steps)
    tried("bare loop, packed", lambda: bare.run(bare.packed))
    tried("bare loop, padded", lambda: bare.run(bare.padded))
    profile.tell()


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
         f"{', '.join(f'{each:.3f}' for each in seconds[6:10])} s")  # fmt: skip
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


CHECKS: dict[str, Callable[[Path], None]] = {
    "text": partial(with_each_attention, kind="text"),
    "vision": partial(with_each_attention, kind="vision"),
    "settings": settings,
    "tasks": tasks,
}
MEASURED: dict[str, Callable[[Path], None]] = {
    "speed-8k": partial(speed, packing_length=8192),
    "syncs": syncs,
    "checkpoints": checkpoints,
    "speed-32k": partial(speed, packing_length=32_768),
    "speed-vision": speed_vision,
    "images": images,
    "compiled": compiled,
}


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(name)s: %(message)s")
    if sys.argv[1] == "--call":
        print(json.dumps(globals()[sys.argv[2]](*json.loads(sys.argv[3]))))
    else:
        faulthandler.register(signal.SIGUSR1)
        ({"machine": machine} | CHECKS | MEASURED)[sys.argv[1]](Path(sys.argv[2]))
