"""How many files and functions of this project three simple requests enter: `python -m tests.walk [--list]`, as JSON.

The requests: convert 278 chats; open the shards and read a first batch; train three steps and save twice. depth: the
deepest stack of the project's own frames. `--list` prints the functions to standard error, in the order of their calls.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

from lmms_stream import (
    ChatProcessor,
    ConvertOptions,
    FSDP2SFTTrainer,
    ModelConfig,
    PackedLoader,
    PackedStreamingDataset,
    PackingConfig,
    TrainConfig,
    convert,
)  # fmt: skip

from .arrows import ROOT

NUM_CHATS = 278
OWN = (f"{ROOT / 'lmms_stream'}{os.sep}", f"{ROOT / 'converters'}{os.sep}")
MODEL = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip


class Walk:
    """Record the calls of the project's functions inside a with statement."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], None] = {}
        self.depth = 0

    def _call(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(OWN):
            return
        self.seen[code.co_filename, code.co_qualname] = None
        depth, above = 0, frame.f_back
        while above is not None:
            depth += above.f_code.co_filename.startswith(OWN)
            above = above.f_back
        self.depth = max(self.depth, depth + 1)

    def __enter__(self) -> Walk:
        sys.setprofile(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def figures(self) -> dict[str, int]:
        if "--list" in sys.argv:
            sys.stderr.write("".join(f"{os.path.relpath(path, ROOT)} {name}\n" for path, name in self.seen))
        return {"files": len({path for path, _ in self.seen}), "functions": len(self.seen), "depth": self.depth}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        os.environ["XDG_CACHE_HOME"] = str(root / "cache")  # without verdicts of earlier starts
        subprocess.run([sys.executable, "examples/prepare.py", str(root)], cwd=ROOT, check=True, stdout=sys.stderr)
        rows = (root / "functions.jsonl").read_text().splitlines(keepends=True)[:NUM_CHATS]
        (root / "rows.jsonl").write_text("".join(rows))
        processor = ChatProcessor.from_pretrained(str(root / "tokenizer"))
        packing = PackingConfig(packing_length=1024, overlong="drop")
        found = {}
        with Walk() as walk:
            convert(
                [str(root / "rows.jsonl")],
                str(root / "out"),
                num_workers=1,
                options=ConvertOptions(processor=processor),
            )
        found["conversion"] = walk.figures()
        with Walk() as walk:
            dataset = PackedStreamingDataset(str(root / "out"), processor=processor, packing=packing)
            next(iter(PackedLoader(dataset, global_batch=4, num_workers=0)))
        found["first batch"] = walk.figures()
        config = TrainConfig(
            output_dir=str(root / "run"), global_batch=4, max_steps=3, num_workers=0, save_steps=2, async_save=False
        )
        dataset = PackedStreamingDataset(str(root / "out"), processor=processor, packing=packing)
        with Walk() as walk:
            FSDP2SFTTrainer(ModelConfig(config=MODEL), config, dataset).train()
        found["three steps"] = walk.figures()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
