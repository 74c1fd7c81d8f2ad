"""StreamingDataLoader under DistributedDataParallel: equal steps on all ranks. Argument: a folder."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from streaming import StreamingDataLoader, StreamingDataset
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    dist.init_process_group("gloo")
    root, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    dataset = StreamingDataset(remote=str(root / "text"), local=str(root / "cache"), shuffle=True, batch_size=4)
    loader = StreamingDataLoader(dataset, batch_size=4)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    lines = []
    for epoch in range(2):
        for batch in loader:
            lengths = torch.tensor([[float(len(text))] for text in batch["text"]])
            loss = (model(lengths) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            lines.append(f"{rank} {epoch} {loss.item():.6f} {batch['text']}")
        lines.append(f"{rank} {loader.state_dict()['sample_in_epoch']}")
    (root / f"rank-{rank}.txt").write_text("\n".join(lines))
    dist.destroy_process_group()
