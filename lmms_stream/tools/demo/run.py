"""The whole path on this machine: corpus, S3, shards, plan, training, kill, resume, comparison."""

from __future__ import annotations

import resource
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ...cli.console import bar, console
from ...cli.console_datasets import print_summary
from ...errors import ConfigError
from ...train.report.train_log import read_log
from ...yaml_text import read_yaml, write_yaml
from ..plan.console import print_plan
from .corpus import VOCABULARY, build_corpus, train_tokenizer
from .endpoint import BUCKET, s3_endpoint
from .jobs import StartJob, Torchrun, compare_runs, read_run, run_job
from .vision import model_fields, save_processor, write_charts, write_pictures, write_videos

Kind = Literal["text", "vision"]
DOING: Mapping[Kind, str] = {
    "text": "reading the standard library, training a tokenizer",
    "vision": "drawing charts and videos, training a tokenizer",
}
STEPS = 20
SAVE_STEPS = 5
KILL_AT = 13  # three steps after a checkpoint
GLOBAL_BATCH = 4
LOSS_TOLERANCE_OTHER_WORLD = 1e-3
MARKER = ".lmms-stream-demo"


def run_demo(output: Path, *, kind: Kind = "text", start: StartJob = Torchrun) -> bool:
    """Run the demo with its files below `output`; whether the resumed runs equal the uninterrupted one.

    start: how its training jobs are started.
    """
    started = time.monotonic()
    if output.exists() and any(output.iterdir()):
        if not (output / MARKER).exists():
            raise ConfigError(f"{output} holds files not written by a demo: pass another folder as --output")
        shutil.rmtree(output)
    output.mkdir(parents=True, exist_ok=True)
    (output / MARKER).touch()
    with s3_endpoint() as endpoint:
        console.print(f"S3 endpoint: {endpoint}, bucket {BUCKET}")
        material = _build(output, kind)
        remote = _convert(material, kind)
        config = _write_config(output, remote, material)
        _plan(config, output)
        kill_step = _train(config, output, start)
    equal = _compare(output, kill_step)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    console.print(f"{time.monotonic() - started:.0f} s in all; the largest process took {peak:,.0f} MiB")
    return equal


def _build(output: Path, kind: Kind) -> Material:
    with console.status(DOING[kind]):
        material = text_material(output) if kind == "text" else vision_material(output)
    console.print(material.about)
    return material


def _convert(material: Material, kind: Kind) -> str:
    with console.status("loading the converter"):
        from ...converters.convert import Progress, convert
        from ...processors import ProcessorConfig

        processor = ProcessorConfig(**material.processor).build()
    target = f"s3://{BUCKET}/{kind}"
    with bar("converting", unit="bytes") as shown:
        report = convert(
            material.sources,
            target,
            processor=processor,
            shard_bytes=1 << 20,
            overwrite=True,
            progress=Progress(begin=shown.begin, advance=shown.advance),
        )
    print_summary(target, report)
    return target


def _write_config(output: Path, remote: str, material: Material) -> Path:
    settings = {
        "dataset": {
            "remote": remote,
            "processor": dict(material.processor),
            "packing_length": material.packing_length,
            "overlong": "drop",
            "seed": 7,
            "shuffle_block_size": 2048,
            "num_canonical_nodes": 2,
        },
        "model": {"config": dict(material.model)},
        "train": {
            "output_dir": str(output / "runs" / "default"),
            "global_batch": GLOBAL_BATCH,
            "max_steps": STEPS,
            "learning_rate": 3e-3,
            "warmup": 5,
            "save_steps": SAVE_STEPS,
            "num_workers": 1,
            "log_sample_ids": True,
        },
    }
    path = output / "run.yaml"
    path.write_text(write_yaml(settings), encoding="utf-8")
    return path


def _plan(config: Path, output: Path) -> None:
    from ...config import build_config
    from ...mds.dataset_config import DatasetConfig  # RunConfig would import torch
    from ...plan.mixture import Mixture
    from ...types import World
    from ..plan.report import plot_plans, report_epoch, report_steps

    dataset = read_yaml(config.read_text(encoding="utf-8"))["dataset"]
    plan = build_config(DatasetConfig, dataset, source=str(config)).open().plan
    steps = report_steps(Mixture({"data": plan}), global_batch=GLOBAL_BATCH, world=World(world_size=2))
    print_plan(
        [report_epoch(plan, source=f"packs of {plan.packing.packing_length}", epoch=0)], steps, [], as_json=False
    )
    if steps.num_steps is None or steps.num_steps <= STEPS:
        raise ConfigError(f"the epoch has {steps.num_steps} steps: the demo needs more than {STEPS}")
    plot_plans({"best_fit": plan}, output / "plan.png")
    console.print(f"plot: {output / 'plan.png'}")


def _train(config: Path, output: Path, start: StartJob) -> int:
    """The uninterrupted run, the killed one, and its two continuations; the last step before the kill."""
    runs = output / "runs"
    with _step_bar("uninterrupted, 2 processes", STEPS) as on_step:
        run_job(config, runs / "uninterrupted", nproc=2, on_step=on_step, start=start)
    with _step_bar(f"killed (SIGKILL) at step {KILL_AT}", KILL_AT) as on_step:
        killed_at = run_job(config, runs / "killed", nproc=2, on_step=on_step, kill_at=KILL_AT, start=start)
    for nproc in (2, 1):
        resumed = runs / f"resumed-{nproc}"
        shutil.copytree(runs / "killed", resumed, ignore=shutil.ignore_patterns("cache"))
        with _step_bar(f"resumed, {nproc} process{'es' if nproc > 1 else ''}", STEPS) as on_step:
            run_job(config, resumed, nproc=nproc, on_step=on_step, start=start)
    return killed_at


@contextmanager
def _step_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    columns = TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=total)
        yield lambda step: progress.update(task, completed=step)


def _compare(output: Path, killed_at: int) -> bool:
    runs = output / "runs"
    resumed = [
        read_run(runs / "resumed-2", name="2 proc", tolerance=0.0),
        read_run(runs / "resumed-1", name="1 proc", tolerance=LOSS_TOLERANCE_OTHER_WORLD),
    ]
    reference = read_run(runs / "uninterrupted", name="whole run", tolerance=0.0)
    table, differences = compare_runs(reference, resumed, first_step=killed_at + 1, last_step=STEPS)
    console.print(table)
    repeated = len(read_log(runs / "resumed-2")) - STEPS
    console.print(
        f"killed after step {killed_at}; resumed from the last checkpoint, so {repeated} steps were done again"
    )
    for difference in differences:
        console.print(f"DIFFERENT: {difference}")
    if not differences:
        console.print(f"EQUAL: sample ids and losses of steps {killed_at + 1} to {STEPS}")
    return not differences


# Data and model of a demo: text or vision.


@dataclass(frozen=True, kw_only=True, slots=True)
class Material:
    """sources: files to be converted. processor: its section of a YAML file. model: fields of a transformers config.

    about: what the sources hold, in a line.
    """

    sources: Sequence[Path]
    processor: Mapping[str, Any]
    model: Mapping[str, Any]
    packing_length: int
    about: str


# The text demo: a chat corpus of the standard library, a tokenizer trained on it, a small Llama.

PACKING_LENGTH = 2048


def text_material(output: Path) -> Material:
    """Made below `output`, in the folders corpus/ and tokenizer/."""
    corpus = build_corpus(output / "corpus")
    tokenizer = train_tokenizer(corpus.texts, output / "tokenizer")
    model = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": PACKING_LENGTH,
        "tie_word_embeddings": False,
    }
    return Material(
        sources=[corpus.functions, corpus.classes],
        processor={"type": "chat", "tokenizer": str(tokenizer)},
        model=model,
        packing_length=PACKING_LENGTH,
        about=f"corpus: {corpus.num_functions:,} functions, {corpus.num_classes:,} classes, as chats",
    )


# The vision demo: charts, pictures and videos with questions about them, and a tiny Qwen2.5-VL to read them.

PACKING_LENGTH_OF_VISION = 512
NUM_CHARTS = 420
NUM_VIDEOS = 40


def vision_material(output: Path) -> Material:
    """Made below `output`, in the folders corpus/ and processor/."""
    corpus = output / "corpus"
    charts = write_charts(corpus / "charts", num_charts=NUM_CHARTS)
    pictures, num_pictures = write_pictures(corpus / "pictures")
    videos = write_videos(corpus / "videos", num_videos=NUM_VIDEOS)
    sources = [charts, pictures, videos]
    processor = save_processor(output / "processor", texts=[path.read_text(encoding="utf-8") for path in sources])
    return Material(
        sources=sources,
        processor={"type": "vision", "path": str(processor), "image_max_pixels": 128 * 28 * 28, "fps": 2},
        model=model_fields(processor, positions=PACKING_LENGTH_OF_VISION),
        packing_length=PACKING_LENGTH_OF_VISION,
        about=f"corpus: {NUM_CHARTS} charts, {num_pictures} pictures of installed packages, {NUM_VIDEOS} videos",
    )
