"""Claim: a tiny model learns to read charts, and on packs what it learns on single samples.

A Qwen2.5-VL of two layers is asked which of the four bars of a chart is the highest, so that guessing gives 25 %. It is
trained on packs of many charts and on packs of one, to the same number of tokens and with about as many in a step, once
for each seed; then it answers for charts that it has not seen. Right is the answer that is more probable than any other
token.

    python benchmarks/chart_learning.py --plot docs/chart_learning.png
    python benchmarks/chart_learning.py --seeds 1 --charts 4000 --tokens 300000
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from measure import print_table, verdict

BARS = "ABCD"
DOTS_PER_INCH = 50  # 112 x 84 pixels: 12 tokens
PACKING_LENGTH = 512
PACKS_A_STEP = 4
RANKS = 2
HELD_OUT = 400  # charts
MAX_S = 1800.0  # of a run
MIN_RIGHT = 0.7
MAX_DIFFERENCE = 0.05  # of the shares that are right, between packs of many and of one, on average over seeds
PROCESSOR_SETTINGS = {"image_max_pixels": 16 * 28 * 28}


def write_charts(folder: Path, *, num_charts: int, seed: int) -> Path:
    from lmms_stream.demo.charts import HIGHEST, chart_name, draw_charts

    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    values = rng.integers(1, HIGHEST + 1, (2 * num_charts, len(BARS)))
    tops = np.sort(values, axis=1)
    values = values[tops[:, -1] > tops[:, -2]][:num_charts]  # one bar is the highest
    draw_charts(folder, values, dots_per_inch=DOTS_PER_INCH)
    rows = folder / "charts.jsonl"
    with rows.open("w", encoding="utf-8") as file:
        for number, bars in enumerate(values):
            question = {"role": "user", "content": "<image>Which bar is the highest?"}
            answer = {"role": "assistant", "content": BARS[int(bars.argmax())]}
            file.write(json.dumps({"messages": [question, answer], "images": [chart_name(number)]}) + "\n")
    return rows


def write_dataset(folder: Path, *, num_charts: int) -> tuple[Path, Path, Path]:
    """The datasets to train on and to be asked of, and the processor's folder."""
    from lmms_stream.converters.convert import convert
    from lmms_stream.demo.tiny_vlm import save_processor
    from lmms_stream.processors.multimodal import MultimodalProcessor

    sources = [
        write_charts(folder / "train-charts", num_charts=num_charts, seed=0),
        write_charts(folder / "held-out-charts", num_charts=HELD_OUT, seed=1),
    ]
    path = save_processor(folder / "processor", texts=[source.read_text() for source in sources])
    processor = MultimodalProcessor.from_pretrained(str(path), **PROCESSOR_SETTINGS)
    targets = folder / "train", folder / "held-out"
    for source, target in zip(sources, targets, strict=True):
        convert([source], str(target), processor=processor)
    return *targets, path


def train(folder: Path, data: Path, processor: Path, *, tokens: int, seed: int, single: bool) -> Path:
    """The folder of the trained model."""
    from lmms_stream.demo.jobs import run_job
    from lmms_stream.demo.tiny_vlm import model_fields

    sample_tokens = 48
    packs = round(PACKS_A_STEP * PACKING_LENGTH / sample_tokens / RANKS) * RANKS if single else PACKS_A_STEP
    settings = {
        "dataset": {
            "remote": str(data),
            "processor": {"type": "vision", "path": str(processor), **PROCESSOR_SETTINGS},
            "packing_length": PACKING_LENGTH,
            "max_samples_per_pack": 1 if single else None,
            "seed": seed,
        },
        "model": {"config": model_fields(processor, positions=PACKING_LENGTH), "seed": seed},
        "train": {
            "output_dir": str(folder),
            "global_batch": packs,
            "per_device_batch": packs // RANKS,
            "max_tokens": tokens,
            "learning_rate": 2e-3,
            "warmup_ratio": 0.05,
            "logging_steps": 10,
            "export": True,
        },
    }
    folder.mkdir(parents=True)
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(settings))
    run_job(config, folder, nproc=RANKS, on_step=lambda step: None, timeout_s=MAX_S)
    return folder / "export"


def share_right(model: Path, data: Path, processor: Path) -> float:
    """Of the held-out charts, the share for which the right answer is more probable than any other token."""
    import torch
    import transformers
    from lmms_stream.mds.core import PackedDataset
    from lmms_stream.mds.streams import StreamConfig
    from lmms_stream.processors.multimodal import MultimodalProcessor

    network = transformers.AutoModelForImageTextToText.from_pretrained(model).eval()
    made_by = MultimodalProcessor.from_pretrained(str(processor), **PROCESSOR_SETTINGS)
    right = 0
    for sample in PackedDataset([StreamConfig(local=data)]).read(range(HELD_OUT)):
        made: Any = made_by.process(sample)
        answer = int(np.flatnonzero(made["labels"] >= 0)[0])
        with torch.no_grad():
            logits = network(
                input_ids=torch.from_numpy(made["input_ids"])[None, :answer],
                **{name: torch.from_numpy(values) for name, values in made["media"].items()},
            ).logits
        right += int(logits[0, -1].argmax()) == int(made["input_ids"][answer])
    return right / HELD_OUT


def losses(folder: Path) -> list[tuple[int, float]]:
    from lmms_stream.train.report.train_log import read_log

    return [(record["tokens_seen"], record["loss"]) for record in read_log(folder) if "tokens_seen" in record]


def plot(curves: dict[str, list[tuple[int, float]]], right: dict[str, float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, points in curves.items():
        style = "-" if name.startswith("packs") else "--"
        axes.plot(*zip(*points, strict=True), style, label=f"{name}: {right[name]:.0%} right")
    axes.axhline(np.log(len(BARS)), color="grey", linewidth=1, label="guessing among four")
    axes.set(xlabel="tokens seen", ylabel="loss, nats a learnt token")
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--charts", type=int, default=10_000, help="to train on")
    parser.add_argument("--tokens", type=int, default=1_500_000, help="of each run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plot", type=Path, help="where the curves are drawn")
    args = parser.parse_args()
    curves: dict[str, list[tuple[int, float]]] = {}
    right: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data, held_out, processor = write_dataset(folder, num_charts=args.charts)
        for seed in range(args.seeds):
            for kind, single in (("packs of many charts", False), ("one chart at a time", True)):
                run = folder / f"{kind.split()[0]}-{seed}"
                model = train(run, data, processor, tokens=args.tokens, seed=seed, single=single)
                said = f"{kind}, seed {seed}"
                curves[said], right[said] = losses(run), share_right(model, held_out, processor)
                print(f"{said}: {right[said]:.1%} right", flush=True)
    rows = [[said, f"{curves[said][-1][1]:.3f}", f"{share:.1%}"] for said, share in right.items()]
    print_table(f"{HELD_OUT} charts that were not seen, after {args.tokens:,} tokens", ["", "loss", "right"], rows)
    packed, alone = (np.mean([s for said, s in right.items() if said.startswith(kind)]) for kind in ("packs", "one"))
    print(f"at least {MIN_RIGHT:.0%} right for each seed: {verdict(min(right.values()) >= MIN_RIGHT)}")
    print(f"packed as single within {MAX_DIFFERENCE:.0%}: {verdict(bool(packed >= alone - MAX_DIFFERENCE))}")
    if args.plot:
        plot(curves, right, args.plot)


if __name__ == "__main__":
    main()
