"""Resumption: a state saved as JSON in the middle of an epoch, loaded by another loader. Argument: a folder."""

import json
import sys
from pathlib import Path

from streaming import StreamingDataLoader, StreamingDataset


def make_loader(root: Path, cache: str) -> StreamingDataLoader:
    dataset = StreamingDataset(remote=str(root / "text"), local=str(root / cache), shuffle=True, batch_size=4)
    return StreamingDataLoader(dataset, batch_size=4, num_workers=2)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    loader = make_loader(root, "first")
    for number, batch in enumerate(loader):
        print("first", batch["text"])
        if number == 3:
            saved = json.dumps(loader.state_dict(), sort_keys=True)
            break
    names = ("epoch", "sample_in_epoch", "num_canonical_nodes", "shuffle_seed", "initial_physical_nodes")
    print({name: json.loads(saved)[name] for name in names})
    resumed = make_loader(root, "second")
    resumed.load_state_dict(json.loads(saved))
    for _ in range(2):
        for batch in resumed:
            print("second", batch["text"])
