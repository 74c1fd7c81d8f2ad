"""A run on 4 nodes of 8 GPUs of a Ray cluster:

    RAY_ADDRESS=http://HEAD:8265 ray job submit --working-dir . -- python ray_train.py run.yaml

Nodes share the bucket only, and have lmms-stream and ray[train]. When a rank or a node is lost, Ray starts all ranks
again, possibly on other nodes, and they resume from the last checkpoint.
Change: the bucket, nodes, GPUs, and CPUs of a rank. Put keys of the store into the environment of the nodes.
"""

import sys
import tempfile
from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

NODES, GPUS = 4, 8


def train(config: dict[str, str]) -> None:
    """Train in a rank. Its node has no copy of the run's file."""
    from lmms_stream.train.__main__ import run

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.yaml")
        path.write_text(config["run"])
        run(path, [])


if __name__ == "__main__":
    TorchTrainer(
        train,
        train_loop_config={"run": Path(sys.argv[1]).read_text()},
        torch_config=TorchConfig(timeout_s=600),  # as train.timeout_s
        scaling_config=ScalingConfig(
            num_workers=NODES * GPUS, use_gpu=True, resources_per_worker={"GPU": 1, "CPU": 12}
        ),
        run_config=RunConfig(storage_path="s3://bucket/ray", failure_config=FailureConfig(max_failures=20)),
    ).fit()
