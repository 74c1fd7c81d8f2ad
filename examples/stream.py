"""Stream packs, stop in the middle of an epoch, and go on from a saved state with more workers.

python examples/stream.py REMOTE TOKENIZER
"""

import json
import sys

from lmms_stream import ChatProcessor, OrderConfig, PackedLoader, PackedStreamingDataset, PackingConfig

remote, tokenizer = sys.argv[1:]


def open_loader(num_workers: int) -> PackedLoader:
    dataset = PackedStreamingDataset(
        remote,
        processor=ChatProcessor.from_pretrained(tokenizer),
        packing=PackingConfig(packing_length=1024, overlong="drop"),
        order=OrderConfig(seed=7),
    )
    return PackedLoader(dataset, global_batch=4, num_workers=num_workers)


loader = open_loader(num_workers=0)
for batch in loader:
    sys.stdout.write(f"step {batch.step}: {batch.num_tokens} tokens of samples {batch.sample_ids.tolist()}\n")
    if batch.step == 2:
        break
state = json.dumps(loader.state_dict())  # two whole steps: the third was delivered in part
sys.stdout.write(f"saved {state}\n")

resumed = open_loader(num_workers=1)
resumed.load_state_dict(json.loads(state))
again = next(iter(resumed))
assert again.sample_ids.tolist() == batch.sample_ids.tolist()
sys.stdout.write(f"the next batch is the one after them: samples {again.sample_ids.tolist()}\n")
