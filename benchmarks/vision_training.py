"""Claims: with images, too, packed steps are faster than padded ones by what padding adds to the language model's
tokens; with one loader worker and steps of 3 times its time for a batch, at most 2 % of the time is waiting for data.

1. Chats with windows of a photograph and answers of different lengths, as packs, and as transformers pads them: a
   pack's chats as the rows of one batch with an attention mask, and the same pixels. Loss and model (a small
   Qwen2.5-VL) are the same (checked). Padding adds nothing to the work of the tower, which is measured by itself: what
   padding adds is (tower + rest x padded tokens / tokens) / (tower + rest). They take turns, step by step, in one
   process on one core; counted is its CPU time.
2. Packs of four photographs of 1 megapixel, as large as they are, made by one worker while the loader's process sleeps
   3 times the CPU time that the worker takes for a pack; counted is the time that it waits for the next one.

    python benchmarks/vision_training.py
    python benchmarks/vision_training.py --steps 8 --packs 20
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from measure import THREAD_SETTINGS, in_fresh_process, print_table, verdict
from photographs import save_tiny_processor, stored_chats, varied_chats, write_mds
from training import WARM_UP, Loop, num_learnt, packed_losses, pad, ratio

MIN_OF_PADDING, MAX_WAIT, TIMES_A_WORKER = 0.9, 0.02, 3
PACKING_LENGTH, GLOBAL_BATCH, WORDS = 1024, 2, (4, 400)
SIDES = (56, 225)  # pixels of an image's sides
HIDDEN_SIZE, NUM_LAYERS = 128, 4
PHOTOGRAPHS = 64
SHARD_BYTES = 4_000_000


def write_datasets(folder: Path, num_steps: int) -> None:
    from lmms_stream.mds.measuring import index_dataset

    save_tiny_processor(folder / "processor")
    rng = np.random.default_rng(0)
    answers = np.clip(rng.lognormal(np.log(60), 0.9, 1000), *WORDS).astype(int).tolist()
    chats = varied_chats(num_steps * GLOBAL_BATCH * 12, sides=SIDES, answers=answers)
    write_mds(folder / "chats", chats, shard_bytes=SHARD_BYTES)
    write_mds(folder / "photographs", stored_chats(PHOTOGRAPHS), shard_bytes=SHARD_BYTES)
    for name in ("chats", "photographs"):
        index_dataset(str(folder / name), processor_of(folder), num_workers=1)


def processor_of(folder: Path) -> Any:
    from lmms_stream.processors.multimodal import MultimodalProcessor

    return MultimodalProcessor.from_pretrained(str(folder / "processor"), image_max_pixels=1008 * 1008)


def loader_of(folder: Path, name: str, *, packing_length: int, global_batch: int, num_workers: int = 0) -> Any:
    """Packs without end."""
    from lmms_stream.loader.loader import SOURCE, PackedLoader
    from lmms_stream.mds.packed import PackedStreamingDataset
    from lmms_stream.plan.packing import PackingConfig

    packing = PackingConfig(packing_length=packing_length)
    dataset = PackedStreamingDataset(
        folder / name, folder / f"cache-{name}", processor=processor_of(folder), packing=packing
    )
    return PackedLoader(dataset, global_batch=global_batch, num_workers=num_workers, weights={SOURCE: 1.0})


# 1


def pack_and_pad(folder: Path, num_steps: int) -> tuple[dict[str, list[float]], float]:
    """Seconds of each step of packs, of the same chats padded, and of the tower alone; tokens that padding makes of
    one.
    """
    import torch
    from lmms_stream.tools.demo.vision import model_fields

    torch.set_num_threads(1)
    config = model_fields(
        folder / "processor", positions=PACKING_LENGTH, hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS
    )
    loop = partial(Loop, sharded=False, config=config, family=processor_of(folder).family)
    packed, padded = loop(losses=packed_losses), loop(losses=padded_losses, attends_as_the_trainer=False)
    padded.model.load_state_dict(packed.model.state_dict())
    seconds: dict[str, list[float]] = {"packed": [], "padded": [], "tower alone": []}
    num_tokens = num_padded = 0
    batches = iter(loader_of(folder, "chats", packing_length=PACKING_LENGTH, global_batch=GLOBAL_BATCH))
    for number in range(num_steps):
        step = list(itertools.islice(batches, GLOBAL_BATCH))
        rows = [{**pad(batch), **batch.inputs} for batch in step]
        num_tokens += sum(batch.num_tokens for batch in step)
        num_padded += sum(batch["input_ids"].numel() for batch in rows)
        if not number:
            check_equal(packed.model, padded.model, step[0], rows[0])
        for name, run in (
            ("packed", partial(packed.step, step, num_loss_tokens=num_learnt(step))),
            ("padded", partial(padded.step, rows, num_loss_tokens=num_learnt(step))),
            ("tower alone", partial(run_tower, packed.model, step)),
        ):
            began = time.process_time()
            run()
            seconds[name].append(time.process_time() - began)
    return seconds, num_padded / num_tokens


def padded_losses(model: Any, rows: Any) -> Any:
    """As PackedModel computes them, of rows that a mask pads."""
    from lmms_stream.train.model.loss import learnt_tokens, token_losses

    inputs = {name: values for name, values in rows.items() if name != "labels"}
    hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
    learnt, targets = learnt_tokens(rows["labels"].flatten()[None])
    head = model.model.get_output_embeddings()
    return token_losses(hidden.flatten(0, 1)[learnt], targets, head, vocab_size=model.vocab_size)[0]


def run_tower(model: Any, step: list[Any]) -> None:
    for batch in step:
        made = model.base_model.visual(batch.inputs["pixel_values"], grid_thw=batch.inputs["image_grid_thw"])
        getattr(made, "pooler_output", made).sum().backward()  # of transformers 5; a tensor of transformers 4
    model.zero_grad()


def check_equal(packed: Any, padded: Any, batch: Any, rows: Any) -> None:
    ours, theirs = (
        float(losses.detach().sum()) for losses in (packed_losses(packed, batch), padded_losses(padded, rows))
    )
    if abs(ours - theirs) > 1e-3 * abs(theirs):
        raise SystemExit(f"the packed loss is {ours}, the padded one {theirs}: they are not of the same chats")


def show_padding(folder: Path, num_steps: int) -> None:
    (seconds, padding), _ = in_fresh_process(pack_and_pad, folder, num_steps)
    rows = [[name, f"{1000 * statistics.median(each[WARM_UP:]):,.1f}"] for name, each in seconds.items()]
    print_table(
        f"steps of {GLOBAL_BATCH} packs of {PACKING_LENGTH}, a small Qwen2.5-VL", ["", "ms of CPU a step"], rows
    )
    tower = ratio(seconds["tower alone"], seconds["packed"])
    expected = tower + (1 - tower) * padding
    gain = ratio(seconds["padded"], seconds["packed"])
    print(
        f"packs are faster by what padding adds: {verdict(gain >= MIN_OF_PADDING * expected)} ({gain:.2f} times; "
        f"padding makes {padding:.2f} times the tokens, and {expected:.2f} times the work, of which the tower is "
        f"{tower:.0%})",
        flush=True,
    )


# 2


def wait(folder: Path, num_packs: int) -> tuple[float, float]:
    """Seconds of CPU that a pack takes, and the share of the time that is waiting."""
    import torch

    torch.set_num_threads(1)
    (sample,) = stored_chats(1)
    opened = partial(
        loader_of, folder, "photographs", packing_length=4 * processor_of(folder).measure(sample), global_batch=1
    )
    of_pack = worker_seconds(opened(num_workers=1), num_packs)
    packs = iter(opened(num_workers=1))
    waited = slept = 0.0
    for number in range(WARM_UP + num_packs):
        before = time.perf_counter()
        batch = next(packs)
        ready = time.perf_counter()
        time.sleep(TIMES_A_WORKER * of_pack)  # a step, on a device
        if number >= WARM_UP:
            waited += ready - before
            slept += time.perf_counter() - ready
    del batch
    return of_pack, waited / (waited + slept)


def worker_seconds(loader: Any, num_packs: int) -> float:
    """Seconds of CPU that the worker of a loader takes for a pack, once it runs."""
    packs = iter(loader)
    used = []
    for number in range(WARM_UP + num_packs):
        next(packs)
        if number in (WARM_UP - 1, WARM_UP + num_packs - 1):
            (worker,) = multiprocessing.active_children()
            user, system = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            used.append((int(user) + int(system)) / os.sysconf("SC_CLK_TCK"))
    return (used[1] - used[0]) / num_packs


def show_waiting(folder: Path, num_packs: int) -> None:
    (of_pack, share), _ = in_fresh_process(wait, folder, num_packs)
    print(f"a pack of 4 photographs: {of_pack * 1000:.0f} ms of CPU; steps of {TIMES_A_WORKER} times that")
    print(f"at most {MAX_WAIT:.0%} of the time is waiting: {verdict(share <= MAX_WAIT)} ({share:.2%})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--packs", type=int, default=100, help="that are waited for")
    parser.add_argument("--folder", type=Path, help="for some MB of files (default: the system's temporary folder)")
    args = parser.parse_args()
    os.environ.update(dict.fromkeys(THREAD_SETTINGS, "1") | {"TOKENIZERS_PARALLELISM": "false"})
    print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        os.environ["TMPDIR"] = name
        in_fresh_process(write_datasets, Path(name), args.steps)
        show_waiting(Path(name), args.packs)
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        show_padding(Path(name), args.steps)


if __name__ == "__main__":
    main()
