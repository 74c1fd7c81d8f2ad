"""Tests of all rooms, in the same folders.

Each process of a run has one thread for its tensors, as torchrun gives its ranks: several processes run side by side,
and threads of OpenMP that wait for each other would take the cores from them. It is read where torch is loaded.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
