"""A data source as a Ray actor, as Relax runs it: ended by force, and gone on with in another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from ..conftest import last_words
from ..rounds import in_long_rounds
from .rows import prompts, write_lines

PROGRAM = """
import json, sys
from types import SimpleNamespace
from lmms_stream.converters.engines.ray_cluster import import_ray, open_cluster
from lmms_stream.rl import RolloutDataSourceWithBuffer

options = SimpleNamespace(prompt_data=sys.argv[1], input_key="text", label_key="label", n_samples_per_prompt=2,
                          rollout_shuffle=True, use_streaming_dataset=True, save=sys.argv[2], load=sys.argv[2])

def told(groups):
    return [[(each.group_index, each.index, each.label) for each in group] for group in groups]

with open_cluster(None, num_cpus=1, timeout_s=60):
    ray = import_ray()
    source_of = ray.remote(num_cpus=0)(RolloutDataSourceWithBuffer)
    source = source_of.remote(options)
    groups = ray.get(source.get_samples.remote(7))
    ray.get(source.add_samples.remote(groups[:2]))
    ray.get(source.save.remote(0))
    expected = [told(ray.get(source.get_samples.remote(5))) for _ in range(3)]
    ray.kill(source)
    resumed = source_of.remote(options)
    ray.get(resumed.load.remote(0))
    found = [told(ray.get(resumed.get_samples.remote(5))) for _ in range(3)]
    length = ray.get(resumed.lengths.remote())
print(json.dumps({"expected": expected, "found": found, "put_back": told(groups[:2]), "length": length}))
"""


@in_long_rounds
def test_a_data_source_is_a_ray_actor_that_goes_on_after_it_was_killed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", prompts(10))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", PROGRAM, str(path), str(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
    assert result.returncode == 0, last_words(result.stdout + result.stderr)
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["found"] == told["expected"]
    assert told["found"][0][:2] == told["put_back"]
    assert told["length"] == 10
