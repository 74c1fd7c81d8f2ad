"""A job: models of many types train some steps, and are saved, exported and loaded. Its argument is a JSON file.

The file names the dataset, and by a name of each case the kind and type of a model in tests/train/every_model.py; of
kind "media", the type is a name in tests/processors/any_vlm.py, whose processor and chats with images lie beside the
file, in `<name>/processor` and `<name>/chats`.
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
import yaml
from lmms_stream.errors import LmmsStreamError
from lmms_stream.processors.multimodal import MultimodalProcessor
from lmms_stream.train.checkpoint.checkpoint import checkpoints
from lmms_stream.train.checkpoint.export import export_checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoProcessor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..processors.any_vlm import ANY, any_config
from ..processors.tiny_vlm import picture, stored
from ..train.every_model import tiny_config
from ..train.runs import trainer_of, write_run
from ..train.vision import plain_inputs


def config_of(kind: str, model_type: str) -> dict[str, Any]:
    config = tiny_config(CONFIG_MAPPING[model_type])
    if kind == "causal":
        config = config.get_text_config()
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    fields.pop("time_step_limit", None)  # infinite, which JSON cannot say
    return fields


def media_run(folder: Path, name: str) -> tuple[Path, dict[str, Any], MultimodalProcessor]:
    """The file of a run whose processor is named by its folder alone, the model's config, and the processor."""
    path = write_run(folder / f"run-{dist.get_rank()}.yaml", folder / "chats", max_steps=2, global_batch=2)
    settings = yaml.safe_load(path.read_text())
    settings["dataset"]["processor"] = {"path": str(folder / "processor")}
    path.write_text(yaml.safe_dump(settings))
    processor = MultimodalProcessor.from_pretrained(str(folder / "processor"))
    return path, any_config(name, processor.family), processor


def run(folder: Path, dataset: str, kind: str, model_type: str) -> dict[str, Any]:
    """What is off after two steps, from the trained model to the loaded one."""
    folder.mkdir(exist_ok=True)
    processor = None
    if kind == "media":
        path, config, processor = media_run(folder, model_type)
    else:
        path = write_run(folder / f"run-{dist.get_rank()}.yaml", dataset, max_steps=2, global_batch=2)
        config = config_of(kind, model_type)
    trainer = trainer_of(path, f"train.output_dir={folder / 'out'}", f"model.config={json.dumps(config)}")
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
    inputs: dict[str, Any] = {"input_ids": torch.arange(5, 45)[None], "use_cache": False}
    if processor is not None:
        assert type(AutoProcessor.from_pretrained(out)).__name__ == ANY[model_type].processor
        sample = processor.process(stored(("user", [("image", picture(60, 40)), "what?"]), ("assistant", "so")))
        inputs = plain_inputs(sample, model=loaded, family=processor.family)
    with torch.no_grad():
        found, expected = (each(**inputs).logits for each in (loaded, plain))
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
