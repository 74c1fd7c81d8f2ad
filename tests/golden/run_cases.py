"""Tiny runs of the trainer: checkpoints in the middle of an epoch, what followed them, and their ledgers.

Checkpoints keep paths as a run names them. Runs are therefore started in the folder that holds datasets/, with relative
paths, and resumed in a copy of this folder.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from contextlib import chdir
from pathlib import Path
from typing import Any

import yaml
from lmms_stream.config import load_config
from lmms_stream.doors.huggingface.trainer import FSDP2SFTTrainer
from lmms_stream.tools.ledger.run import Ledger
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.run.distributed import end_distributed, init_distributed
from lmms_stream.train.run_config import RunConfig

from .digests import write_json

MODEL = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
SAVED, LAST = 3, 7  # steps of the checkpoint, and of the whole run


def _data(name: str) -> dict[str, Any]:
    order = {"seed": 5, "num_canonical_nodes": 2, "shuffle_block_size": 32}
    return {"remote": f"datasets/{name}", "processor": {"type": "tokens"}, "packing_length": 128, **order}


def _run(name: str, **train: Any) -> dict[str, Any]:
    settings = {
        "output_dir": f"runs/{name}",
        "global_batch": 2,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "cosine",
        "max_steps": LAST,
        "save_steps": SAVED,
        "num_workers": 0,
        "timeout_s": 60,
        "log_sample_ids": True,
        "logging_steps": 1,
    }
    return {"dataset": _data("numbers"), "model": {"config": MODEL, "seed": 3}, "train": settings | train}


def _of_two(name: str, **train: Any) -> dict[str, Any]:
    run = _run(name, weights={"numbers": 2, "others": 1}, **train)
    del run["dataset"]
    return run | {"datasets": {source: _data(source) for source in ("numbers", "others")}}


LORA = {"model": {"config": MODEL, "seed": 3, "adapter": {"r": 2, "target_modules": ["q_proj", "v_proj"]}}}
RUNS: dict[str, dict[str, Any]] = {
    "deal": _run("deal"),
    "window": _of_two("window", balance=5, optim="sgd"),
    "mixed": _of_two("mixed", mixing="samples", optim="sgd", skip_steps=[[1, 2]]),
    "lora": _run("lora") | LORA,
}


def trainer_of(path: Path, *overrides: str) -> FSDP2SFTTrainer:
    """Return the trainer of a run's file, in this process alone."""
    config = load_config(RunConfig, path, overrides)
    world, _ = init_distributed(config.train.timeout_s)
    return FSDP2SFTTrainer(model=config.model.build(), args=config.train, train_dataset=config.build_datasets(world))


def train(name: str, *overrides: str) -> list[dict[str, Any]]:
    """Train, or resume, a run of the current folder; return step, loss and samples of each step in its log."""
    try:
        trainer_of(Path(f"runs/{name}.yaml"), *overrides).train()
    finally:
        end_distributed()
    return [
        {"step": record["step"], "loss": record["loss"], "sample_ids": [str(each) for each in record["sample_ids"]]}
        for record in read_log(Path(f"runs/{name}"))
    ]


def ledgers(name: str) -> dict[str, Any]:
    """Return the ledgers of a run of the current folder: of its checkpoint, and of its config before the run."""
    return {
        "checkpoint": ledger_facts(f"runs/{name}/checkpoints/step-{SAVED:08}"),
        "config": ledger_facts(f"runs/{name}.yaml"),
    }


def write_runs(root: Path) -> None:
    """Write runs/ below a folder: configs, and the runs as if they were ended after the checkpoint; runs.json."""
    found = {}
    (root / "runs").mkdir()
    with chdir(root):
        for name, run in RUNS.items():
            Path(f"runs/{name}.yaml").write_text(yaml.safe_dump(run))
            log = train(name)
            for step in range(SAVED + 1, LAST + 1):
                shutil.rmtree(f"runs/{name}/checkpoints/step-{step:08}", ignore_errors=True)
            path = Path(f"runs/{name}/train_log.jsonl")
            records = [line for line in path.read_text().splitlines() if json.loads(line).get("step", 0) <= SAVED]
            path.write_text("".join(f"{line}\n" for line in records))
            for lock in Path(f"runs/{name}").rglob(".run.lock"):
                lock.unlink()
            found[name] = {"log": log, "ledgers": ledgers(name)}
    write_json(root / "runs.json", found)


def ledger_facts(run: str) -> dict[str, Any]:
    """Return what `lmms-stream ledger` tells of a run: steps, samples, amounts and the end."""
    ledger = Ledger(run)
    steps = []
    for number in range(ledger.stop):
        entry = ledger.step(number)
        packs = [f"{pack.source} {' '.join(map(str, pack.sample_ids.tolist()))} {pack.group}" for pack in entry.packs]
        steps.append({"number": entry.number, "is_skipped": entry.is_skipped, "packs": packs})
    samples = {
        f"{source}:{number}": [dataclasses.asdict(entry) for entry in ledger.sample(source, number)]
        for source in ledger.identities
        for number in (0, 7, 33)
    }
    amounts = {
        str(stop): {name: dataclasses.asdict(amount) for name, amount in ledger.amounts(stop).items()}
        for stop in (0, 1, ledger.stop, LAST)
    }
    facts = {
        "stop": ledger.stop,
        "end": ledger.end,
        "identities": dict(ledger.identities),
        "urls": {name: Path(url).name for name, url in ledger.urls.items()},
        "steps": steps,
        "samples": samples,
        "amounts": amounts,
    }
    plain: dict[str, Any] = json.loads(json.dumps(facts, default=str))
    return plain
