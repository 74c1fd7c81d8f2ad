"""A job: models of many types train some steps, and are saved, exported and loaded. Its argument is a JSON file.

The file names the dataset, and by a name of each case the kind and type of a model in tests/train/every_model.py.
Rank 0 writes `results.json` beside it: by case, what the loaded model's logits and tensors are off by, or the error.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from lmms_stream.errors import LmmsStreamError
from lmms_stream.train.checkpoint.checkpoint import checkpoints
from lmms_stream.train.checkpoint.export import export_checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..train.every_model import tiny_config
from ..train.runs import trainer_of, write_run


def config_of(kind: str, model_type: str) -> dict[str, Any]:
    config = tiny_config(CONFIG_MAPPING[model_type])
    if kind == "causal":
        config = config.get_text_config()
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    fields.pop("time_step_limit", None)  # infinite, which JSON cannot say
    return fields


def run(folder: Path, dataset: str, kind: str, model_type: str) -> dict[str, Any]:
    """What is off after two steps, from the trained model to the loaded one."""
    folder.mkdir(exist_ok=True)
    path = write_run(folder / f"run-{dist.get_rank()}.yaml", dataset, max_steps=2, global_batch=2)
    trainer = trainer_of(
        path, f"train.output_dir={folder / 'out'}", f"model.config={json.dumps(config_of(kind, model_type))}"
    )
    trainer.train()
    model: Any = trainer.model.model
    whole: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if dist.get_rank():
        return {}
    out = export_checkpoint(checkpoints(folder / "out" / "checkpoints")[-1], folder / "model")
    named = json.loads((out / "config.json").read_text())["architectures"][0]
    loaded = getattr(transformers, named).from_pretrained(out).eval()
    state = loaded.state_dict()
    plain = type(loaded)(loaded.config).eval()
    plain.load_state_dict(whole)
    tokens = torch.arange(5, 45)[None]
    with torch.no_grad():
        found, expected = (each(input_ids=tokens, use_cache=False).logits for each in (loaded, plain))
    return {
        "tensors": sorted(name for name in whole if not torch.equal(state[name], whole[name])),
        "logits": float((found - expected).abs().max()),
    }


def main() -> None:
    path = Path(sys.argv[1])
    job = json.loads(path.read_text())
    dist.init_process_group("gloo")
    results = {}
    for name, (kind, model_type) in job["cases"].items():
        try:
            results[name] = run(path.parent / name, job["dataset"], kind, model_type)
        except (RuntimeError, ValueError, LookupError, AttributeError, TypeError, LmmsStreamError) as error:
            results[name] = {"error": f"{type(error).__name__}: {error}", "where": traceback.format_exc()[-1500:]}
        if dist.get_rank() == 0:
            (path.parent / "results.json").write_text(json.dumps(results))
        dist.barrier()


if __name__ == "__main__":
    main()
