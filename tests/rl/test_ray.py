"""A data source and actors that generate as Ray actors, as Relax runs them: ended by force, and gone on with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..conftest import last_words
from ..rounds import in_long_rounds
from .rows import prompts, write_lines

PROGRAM = """
import json, sys
from types import SimpleNamespace
from lmms_stream.plugins.engines.ray_cluster import import_ray, open_cluster
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


ACTORS = """
import json, sys
from types import SimpleNamespace
from lmms_stream.plugins.engines.ray_cluster import import_ray, open_cluster
from lmms_stream.rl import RolloutDataSourceWithBuffer

options = SimpleNamespace(prompt_data=sys.argv[1], input_key="text", label_key="label", n_samples_per_prompt=2,
                          save=sys.argv[2], load=sys.argv[2])

class Generating:
    def __init__(self, source, holder):
        self.source, self.holder = source, holder

    def take(self, count):
        groups = ray.get(self.source.get_samples.remote(count, holder=self.holder))
        self.numbers = [group[0].group_index for group in groups]
        return self.numbers

    def deliver(self, rollout_id):
        ray.get(self.source.finish.remote(self.numbers, rollout_id))

with open_cluster(None, num_cpus=1, timeout_s=60):
    ray = import_ray()
    source_of, actor_of = (ray.remote(num_cpus=0)(each) for each in (RolloutDataSourceWithBuffer, Generating))
    source = source_of.remote(options)
    actors = [actor_of.remote(source, str(number)) for number in range(3)]
    told = {"taken": [ray.get(actor.take.remote(3)) for actor in actors]}
    ray.get(actors[1].deliver.remote(0))
    ray.get(actors[2].deliver.remote(1))
    ray.get(source.save.remote(0))
    ray.kill(actors[0])
    told["lost"] = ray.get(source.put_back.remote("0"))
    told["again"] = ray.get(actor_of.remote(source, "0").take.remote(4))
    ray.kill(source)
    resumed = source_of.remote(options)
    ray.get(resumed.load.remote(0))
    told["resumed"] = ray.get(actor_of.remote(resumed, "0").take.remote(8))
print(json.dumps(told))
"""


def run(program: str, tmp_path: Path) -> dict[str, Any]:
    path = write_lines(tmp_path / "rows.jsonl", prompts(10))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", program, str(path), str(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
    assert result.returncode == 0, last_words(result.stdout + result.stderr)
    told: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return told


@in_long_rounds
def test_a_data_source_is_a_ray_actor_that_goes_on_after_it_was_killed(tmp_path: Path) -> None:
    told = run(PROGRAM, tmp_path)
    assert told["found"] == told["expected"]
    assert told["found"][0][:2] == told["put_back"]
    assert told["length"] == 10


@in_long_rounds
def test_prompts_of_ray_actors_that_are_killed_come_first_again(tmp_path: Path) -> None:
    assert run(ACTORS, tmp_path) == {
        "taken": [[0, 1, 2], [3, 4, 5], [6, 7, 8]],
        "lost": 3,
        "again": [0, 1, 2, 9],
        "resumed": [0, 1, 2, 6, 7, 8, 9, 10],  # rollout 1 was delivered, and no state of it was saved
    }
