"""Claims: chats with a video, and with a video and its sound, come as batches with at most half of the CPU time that
files take through the family's own processor in a torch DataLoader; chats with a sound, of which both spend most on the
same libraries' decoding and resampling, with less; all of them sooner. The workers that make them have no more memory
after thousands of packs than after some hundred.

1. The families are Qwen2-Audio, Qwen2.5-VL and Qwen2.5-Omni, with the settings of the released processors. Batches are
   made by the same number of worker processes, with one thread each, of the same recordings (checked: tokens, patches
   and frames of sound of an epoch are equal): ours from MDS shards as packs, theirs a file a chat, sounds read by
   soundfile and soxr, 16 frames of each video by transformers' load_video with PyAV, then transformers' processor of
   each batch of four chats. Seconds are those of an epoch, from opening the dataset to the last batch, best of the
   rounds, in which the two take turns, each in a process that has done its imports and processed a chat. CPU seconds
   are those of the process and its workers together.
2. Private memory of a worker, and of its consumer, after more and more packs, epoch after epoch: the least of the last
   NUM_INSTANTS packs, as a recording that is being decoded takes memory for a moment. What counts as no growth is as in
   memory.py.

    python benchmarks/sound.py
    python benchmarks/sound.py --chats 24 --rounds 1 --packs 100 --first 20 --kinds sound
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from measure import THREAD_SETTINGS, in_fresh_process, print_table, verdict
from memory import Memory, memory_of, show
from recordings import KINDS, save_processor, write_files
from sound_contestants import BATCH, WORKERS, Contestant, Job, by_transformers, our_loader, our_processor, ours
from vision import Epoch, measured

MIN_TIMES_FILES = {"sound": 1.0, "video": 2.0, "omni": 2.0}  # of CPU time
FAMILIES = {"sound": "Qwen2-Audio", "video": "Qwen2.5-VL", "omni": "Qwen2.5-Omni"}
LONGEST = {"sound": 1024, "video": 2816, "omni": 2816}  # tokens of a chat at most
NUM_MEASURED = 8  # times that memory is
NUM_INSTANTS = 40
IMPORTED = (
    "torch", "streaming", "soundfile", "soxr", "av", "transformers.models.qwen2_5_vl.processing_qwen2_5_vl",
    "transformers.models.qwen2_audio.processing_qwen2_audio",
    "transformers.models.qwen2_5_omni.processing_qwen2_5_omni",
    "transformers.models.qwen2_vl.video_processing_qwen2_vl", "lmms_stream.loader.loader",
    "lmms_stream.processors.multimodal", "lmms_stream.plan.kernels.best_fit",
)  # fmt: skip


def write_dataset(folder: Path, kind: str, chats: int) -> None:
    from lmms_stream.converters.convert import convert

    path = save_processor(folder / "processor", kind)
    source = write_files(folder / "files", kind, chats)
    convert([source], str(folder / "mds"), processor=our_processor(kind, str(path)))


def compare(folder: Path, kind: str, *, chats: int, rounds: int) -> None:
    job = partial(
        Job, kind=kind, processor=str(folder / "processor"), chats=chats, packing_length=BATCH * LONGEST[kind]
    )
    contestants: dict[str, tuple[Contestant, Job]] = {
        "lmms_stream": (ours, job(folder=str(folder / "mds"))),
        "files, transformers": (by_transformers, job(folder=str(folder / "files"))),
    }
    best = measured(contestants, rounds, IMPORTED)
    mine, theirs = best.values()
    rows = [row(name, each, mine, chats) for name, each in best.items()]
    columns = ["", "chats/s", "a second of CPU", "times ours", "of CPU"]
    print_table(f"{FAMILIES[kind]}: {chats} chats with a recording each, {WORKERS} workers", columns, rows)
    of_cpu, of_wall = theirs.cpu / mine.cpu, theirs.wall / mine.wall
    least, said = MIN_TIMES_FILES[kind], f"{of_cpu:.2f}; of wall time {of_wall:.2f}"
    met = of_cpu > least and of_wall > 1
    print(f"{kind}: more than {least:.0f} times the CPU time, and longer: {verdict(met)} ({said})", flush=True)


def row(name: str, each: Epoch, mine: Epoch, chats: int) -> list[str]:
    rates = f"{chats / each.wall:.1f}", f"{chats / each.cpu:.1f}"
    return [name, *rates, f"{each.wall / mine.wall:.2f}", f"{each.cpu / mine.cpu:.2f}"]


def read(job: Job, counts: Sequence[int]) -> dict[str, list[Memory]]:
    """Memory of a worker and of its consumer up to each of `counts` packs."""
    found: dict[str, list[Memory]] = {"consumer": [], "worker": []}
    instants: list[tuple[Memory, Memory]] = []
    for number, _ in enumerate(our_loader(job, num_workers=1, endless=True), 1):
        if any(count - NUM_INSTANTS < number <= count for count in counts):
            (worker,) = multiprocessing.active_children()
            instants.append((memory_of("self", number), memory_of(worker.pid or 0, number)))
        if number in counts:
            for name, series in zip(found, zip(*instants, strict=True), strict=True):
                found[name].append(min(series, key=lambda each: each.anonymous))
            instants.clear()
        if number == counts[-1]:
            break
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=96, help="with a recording each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--packs", type=int, default=4000, help="after which memory is compared; 0: not at all")
    parser.add_argument("--first", type=int, default=400, help="packs after which memory is to grow no more")
    parser.add_argument("--folder", type=Path, help="where datasets are written; default: the temporary folder")
    args = parser.parse_args()
    os.environ.update(dict.fromkeys(THREAD_SETTINGS, "1") | {"TOKENIZERS_PARALLELISM": "false"})
    print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        os.environ["TMPDIR"] = name
        for kind in args.kinds:
            folder = Path(name, kind)
            in_fresh_process(write_dataset, folder, kind, args.chats)
            if args.rounds:
                compare(folder, kind, chats=args.chats, rounds=args.rounds)
            if args.packs:
                counts = np.linspace(args.first, args.packs, NUM_MEASURED).round().astype(int).tolist()
                job = Job(
                    kind=kind, folder=str(folder / "mds"), processor=str(folder / "processor"), chats=args.chats,
                    packing_length=LONGEST[kind],
                )  # fmt: skip
                found, _ = in_fresh_process(read, job, counts)
                show(found, f"{FAMILIES[kind]}: {args.chats} chats in packs of {job.packing_length}, over and over")


if __name__ == "__main__":
    main()
