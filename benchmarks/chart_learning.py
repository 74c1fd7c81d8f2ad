"""Claim: a tiny model learns to read charts, and on packs what it learns on single samples.

A Qwen2.5-VL of two layers is asked which of the four bars of a chart is the highest, so that guessing gives 25 %. It is
trained on packs of many charts and on packs of one, to the same number of tokens and with about as many in a step, once
for each seed; then it answers for charts whose heights no chart that it was trained on has. Right is the answer that is
more probable than any other token.

    python benchmarks/chart_learning.py --plot docs/chart_learning.png
    python benchmarks/chart_learning.py --seeds 1 --charts 1000 --tokens 100000
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from answers import share_right
from measure import loss_plot, print_table, verdict
from numpy.typing import NDArray

DOTS_PER_INCH = 50  # 112 x 84 pixels: 12 tokens
PACKING_LENGTH = 512
PACKS_A_STEP = 2
RANKS = 2
HELD_OUT = 400  # charts
LOGGING_STEPS = 10
MAX_RUN_S = 1800.0
MAX_S = 1800.0  # of all runs, drawing and converting
MIN_RIGHT = 0.7
MAX_DIFFERENCE = 0.05  # of the shares that are right, between packs of many and of one, on average over seeds
PROCESSOR_SETTINGS = {"image_max_pixels": 16 * 28 * 28}
PACKED, SINGLE = "packs of many charts", "one chart at a time"


def different_charts() -> NDArray[np.int64]:
    """All heights of four bars, each once, of which one is the highest, in random order: int64[5184, 4]."""
    from lmms_stream.tools.demo.vision import HIGHEST, NAMES

    heights = np.array(list(itertools.product(range(1, HIGHEST + 1), repeat=len(NAMES))))
    tops = np.sort(heights, axis=1)
    return np.random.default_rng(0).permutation(heights[tops[:, -1] > tops[:, -2]])


def write_charts(folder: Path, heights: NDArray[np.int64]) -> Path:
    from lmms_stream.tools.demo.vision import NAMES, chart_name, draw_charts

    folder.mkdir(parents=True)
    draw_charts(folder, heights, dots_per_inch=DOTS_PER_INCH)
    path = folder / "charts.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number, bars in enumerate(heights):
            question = {"role": "user", "content": "<image>Which bar is the highest?"}
            answer = {"role": "assistant", "content": NAMES[int(bars.argmax())]}
            file.write(json.dumps({"messages": [question, answer], "images": [chart_name(number)]}) + "\n")
    return path


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    train: Path
    held_out: Path
    processor: Path
    tokens_a_chart: float


def write_datasets(folder: Path, *, num_charts: int) -> Data:
    from lmms_stream.converters.convert import convert
    from lmms_stream.mds.core import PackedDataset
    from lmms_stream.mds.streams import StreamConfig
    from lmms_stream.processors.multimodal import MultimodalProcessor
    from lmms_stream.tools.demo.vision import save_processor

    heights = different_charts()
    if not 0 < num_charts <= len(heights) - HELD_OUT:
        raise SystemExit(
            f"--charts must be 1 to {len(heights) - HELD_OUT}, as many as there are besides those held out"
        )
    sources = {
        "train": write_charts(folder / "train-charts", heights[HELD_OUT:][:num_charts]),
        "held-out": write_charts(folder / "held-out-charts", heights[:HELD_OUT]),
    }
    path = save_processor(folder / "processor", texts=[source.read_text() for source in sources.values()])
    processor = MultimodalProcessor.from_pretrained(str(path), **PROCESSOR_SETTINGS)
    for name, source in sources.items():
        convert([source], str(folder / name), processor=processor)
    train = PackedDataset([StreamConfig(local=folder / "train")], processor=processor)
    tokens = float(train.length_index().lengths.mean())
    return Data(train=folder / "train", held_out=folder / "held-out", processor=path, tokens_a_chart=tokens)


def train(folder: Path, data: Data, *, tokens: int, seed: int, single: bool) -> Path:
    """The folder of the trained model."""
    from lmms_stream.tools.demo.jobs import run_job
    from lmms_stream.tools.demo.vision import model_fields

    packs = PACKS_A_STEP
    if single:
        packs *= round(PACKING_LENGTH / data.tokens_a_chart)
    settings = {
        "dataset": {
            "remote": str(data.train),
            "processor": {"type": "vision", "path": str(data.processor), **PROCESSOR_SETTINGS},
            "packing_length": PACKING_LENGTH,
            "max_samples_per_pack": 1 if single else None,
            "seed": seed,
        },
        "model": {"config": model_fields(data.processor, positions=PACKING_LENGTH), "seed": seed},
        "train": {
            "output_dir": str(folder),
            "global_batch": packs,
            "per_device_batch": packs // RANKS,
            "max_tokens": tokens,
            "learning_rate": 2e-3,
            "warmup": 0.05,
            "logging_steps": LOGGING_STEPS,
            "export": True,
        },
    }
    folder.mkdir(parents=True)
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(settings))
    run_job(config, folder, nproc=RANKS, on_step=lambda step: None, timeout_s=MAX_RUN_S)
    return folder / "export"


def right_of(model: Path, data: Data) -> float:
    """The share of held-out charts that a trained model reads right."""
    import transformers
    from lmms_stream.processors.multimodal import MultimodalProcessor

    network = transformers.AutoModelForImageTextToText.from_pretrained(model).eval()
    processor = MultimodalProcessor.from_pretrained(str(data.processor), **PROCESSOR_SETTINGS)
    return share_right(network, processor, data.held_out, HELD_OUT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    kind: str
    seed: int
    curve: list[tuple[int, float]]  # tokens seen; loss in nats an answer, mean of the steps since the record before
    right: float

    def tokens_to(self, loss: float) -> str:
        reached = [seen for seen, of_answer in self.curve if of_answer < loss]
        return f"{reached[0]:,}" if reached else "never"


def answer_losses(folder: Path) -> Iterator[tuple[int, float]]:
    from lmms_stream.train.report.train_log import read_log

    answers = 0
    for record in read_log(folder):
        if "tokens_seen" in record:
            answers, before = record["samples_seen"], answers
            yield record["tokens_seen"], record["loss"] * record["num_loss_tokens"] / (answers - before)


def run_all(data: Data, folder: Path, *, tokens: int, seeds: int) -> list[Run]:
    runs = []
    for seed in range(seeds):
        for kind in (PACKED, SINGLE):
            output = folder / f"{kind.split()[0]}-{seed}"
            model = train(output, data, tokens=tokens, seed=seed, single=kind == SINGLE)
            run = Run(kind=kind, seed=seed, curve=[*answer_losses(output)], right=right_of(model, data))
            print(f"{run.kind}, seed {run.seed}: {run.right:.1%} right", flush=True)
            runs.append(run)
    return runs


def plot(runs: list[Run], guessing: float, path: Path) -> None:
    with loss_plot(path, "loss, nats an answer", ylim=(0, 3 * guessing)) as axes:
        for run in runs:
            style, color = ("-", "C0") if run.kind == PACKED else ("--", "C1")
            label = (
                f"{run.kind}: {np.mean([r.right for r in runs if r.kind == run.kind]):.1%} right"
                if not run.seed
                else None
            )
            axes.plot(*zip(*run.curve, strict=True), style, color=color, linewidth=1, label=label)
        axes.axhline(guessing, color="grey", linewidth=1, label="guessing among four: 25 % right")


def report(runs: list[Run], *, tokens: int, guessing: float, seconds: float) -> None:
    rows = [
        [f"{run.kind}, seed {run.seed}", run.tokens_to(guessing / 2), f"{run.curve[-1][1]:.3f}", f"{run.right:.1%}"]
        for run in runs
    ]
    columns = ["", "tokens to half of guessing's loss", "loss at the end", "right"]
    print_table(f"{HELD_OUT} charts that were not seen, after {tokens:,} tokens", columns, rows)
    packed, alone = (np.mean([run.right for run in runs if run.kind == kind]) for kind in (PACKED, SINGLE))
    difference = abs(float(packed - alone))
    print(f"at least {MIN_RIGHT:.0%} right for each seed: {verdict(min(run.right for run in runs) >= MIN_RIGHT)}")
    print(f"packed as single within {MAX_DIFFERENCE:.0%}: {verdict(difference <= MAX_DIFFERENCE)} ({difference:.1%})")
    print(f"all of it within {MAX_S / 60:.0f} minutes: {verdict(seconds <= MAX_S)} ({seconds / 60:.1f})")


def main() -> None:
    from lmms_stream.tools.demo.vision import NAMES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--charts", type=int, default=4000, help="to train on")
    parser.add_argument("--tokens", type=int, default=400_000, help="of each run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plot", type=Path, help="where the curves are drawn")
    args = parser.parse_args()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        data = write_datasets(Path(name), num_charts=args.charts)
        print(f"charts drawn and converted in {time.perf_counter() - begun:.0f} s", flush=True)
        runs = run_all(data, Path(name), tokens=args.tokens, seeds=args.seeds)
    guessing = float(np.log(len(NAMES)))
    report(runs, tokens=args.tokens, guessing=guessing, seconds=time.perf_counter() - begun)
    if args.plot:
        plot(runs, guessing, args.plot)


if __name__ == "__main__":
    main()
