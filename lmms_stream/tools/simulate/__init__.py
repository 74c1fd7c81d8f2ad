"""Simulation of a plan on a cluster: bytes, requests, waiting, memory and cost, from indexes and lengths only.

cluster     nodes, links, caches and prices
sources     the datasets of a run -> plans and shards
described   plans and shards of datasets that do not exist yet, from a few numbers
needs       mixture + step config -> the shards that each node reads in each step, and their next use
replay      needs + caches -> downloads
links       compiled loops: reads through a cache; downloads + links -> waiting
measured    downloads -> figures; memory of a loader worker
run         simulate(): datasets + cluster -> figures; the same run with other settings, and advice
page        figures -> tables in a terminal, an HTML page
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import lazy_names

if TYPE_CHECKING:
    from .cluster import Cluster as Cluster
    from .described import DescribedSource as DescribedSource
    from .described import describe as describe
    from .measured import Simulation as Simulation
    from .run import simulate as simulate

_HOME = {
    "Cluster": "cluster",
    "DescribedSource": "described",
    "Simulation": "measured",
    "describe": "described",
    "simulate": "run",
}

__all__ = [*_HOME]

__getattr__, __dir__ = lazy_names(__name__, _HOME)
