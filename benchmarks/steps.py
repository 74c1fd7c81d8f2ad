"""Claims: a step of n micro-batches sums gradients over ranks once with accumulate: unsharded, and n times with
sharded; blocks that stay gathered are gathered once; whatever is accumulated, the host reads the device once a step.

Two ranks (gloo, on CPUs) train the same packs in each way, each way in processes of its own. Counted are the
collectives of a step by torch's profiler, its reads for which a GPU's host would wait (tests/train/step_costs.py), CPU
seconds of a rank for a step, and the most memory of a rank.

    python benchmarks/steps.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from data import sample_lengths, write_tokens
from measure import MIB, print_table, status_bytes, verdict

NUM_RANKS, MICRO_BATCHES, PACKING_LENGTH, VOCABULARY = 2, 4, 512, 16384
NUM_BLOCKS, WARM_UP = 4, 2
MODEL = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 8,
    "tie_word_embeddings": True,
}
WAYS: dict[str, dict[str, Any]] = {
    "sharded": {"fsdp": {"accumulate": "sharded"}},
    "unsharded": {"fsdp": {"accumulate": "unsharded"}},
    "unsharded, gathered": {"fsdp": {"accumulate": "unsharded", "reshard_after_forward": False}},
    "copies (HSDP)": {"fsdp": {"accumulate": "sharded"}, "shard_ranks": 1},
}


def rank_main(folder: Path, way: str, num_steps: int) -> None:
    """Train in one way; rank 0 writes what it counted."""
    import torch
    from lmms_stream import FSDP2SFTTrainer
    from lmms_stream.mds.packed import PackedStreamingDataset
    from lmms_stream.plan.packing import PackingConfig
    from lmms_stream.processors.text import TokensProcessor
    from lmms_stream.signals import StopSignal
    from lmms_stream.train.loop import Loop
    from lmms_stream.train.model.build import ModelConfig
    from lmms_stream.train.run.distributed import end_distributed, init_distributed
    from lmms_stream.train.run.settings import TrainConfig

    sys.path.append(str(Path(__file__).parents[1]))
    from tests.train.step_costs import collectives, reads

    torch.set_num_threads(1)
    world, _ = init_distributed(120)
    packing = PackingConfig(packing_length=PACKING_LENGTH)
    data = PackedStreamingDataset(
        folder / "data", folder / "cache", processor=TokensProcessor(), packing=packing, world=world
    )
    args = TrainConfig(
        output_dir=str(folder / "out"), global_batch=MICRO_BATCHES * NUM_RANKS, num_workers=0, timeout_s=120,
        max_steps=WARM_UP + num_steps + 2, **WAYS[way],
    )  # fmt: skip
    trainer = FSDP2SFTTrainer(ModelConfig(config=MODEL).build(), args, data)
    trainer.build()
    found: dict[str, Any] = {}
    with StopSignal() as stop, trainer.run_log.running(trainer.schedule, step=0, position=0):
        trainer.model.train()
        trainer.meter.start()
        loop, seconds = Loop(trainer, stop), []
        for number, batches in enumerate(trainer.data.steps_of(iter(trainer.loader))):
            if number == WARM_UP:
                with collectives() as counts:
                    loop.train_step(batches)
                found |= counts
            elif number == WARM_UP + 1:  # not in one step: what counts reads has the profiler see each operation twice
                with reads() as made:
                    loop.train_step(batches)
                found["reads"] = sum(made.values())
            else:
                begun = time.process_time()
                loop.train_step(batches)
                seconds.append(time.process_time() - begun)
            if number == WARM_UP + 1 + num_steps:
                break
    if world.rank == 0:
        peak = status_bytes()["VmHWM"] / MIB
        found |= {"seconds": min(seconds[WARM_UP:]), "peak": peak}
        (folder / f"{way}.json").write_text(json.dumps(found))
    end_distributed()


def run(folder: Path, way: str, num_steps: int) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}", __file__,
        "--rank-of", way, "--folder", str(folder), "--steps", str(num_steps),
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=1200, env=os.environ | {"OMP_NUM_THREADS": "1"})
    made: dict[str, Any] = json.loads((folder / f"{way}.json").read_text())
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rank-of", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        rank_main(options.folder, options.rank_of, options.steps)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        num_samples = 200 * (options.steps + WARM_UP + 2)
        lengths = sample_lengths("chat", num_samples, limit=PACKING_LENGTH)
        write_tokens(folder / "data", lengths, shard_bytes=1 << 20, vocabulary=VOCABULARY)
        made = {way: run(folder, way, options.steps) for way in WAYS}
    columns = ("reduce_scatter", "all_reduce", "all_gather", "reads")
    rows = [
        [way, *(str(each.get(name, 0)) for name in columns), f"{each['seconds']:.2f}", f"{each['peak']:.0f}"]
        for way, each in made.items()
    ]
    title = f"A step of {MICRO_BATCHES} micro-batches, {NUM_BLOCKS} blocks, on {NUM_RANKS} ranks"
    print_table(title, ["accumulate", *columns, "CPU s a step", "peak MiB"], rows)
    groups = NUM_BLOCKS + 1
    once = made["unsharded"]["reduce_scatter"] == groups
    each_time = made["sharded"]["reduce_scatter"] == groups * MICRO_BATCHES
    print(f"sums over ranks once a step, unsharded, and once a micro-batch, sharded: {verdict(once and each_time)}")
    print(f"one read a step: {verdict(all(each['reads'] == 1 for each in made.values()))}")


if __name__ == "__main__":
    main()
