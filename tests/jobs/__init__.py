"""Training jobs of several processes, on the CPU: the same gradients, losses and records as computed without them.

launcher            ranks of a job, forked from a server that has imported torch: real processes that start at once
torchrun            the same by real torchrun
runs                configs of runs, and what runs with the same data have in common
sharding_job        what ranks run: one step for each of some cases; divided_cases: models that ranks divide
divided_runs        configs of runs whose model ranks divide, and their comparison with one rank's
evaluation_job      evaluations for each of some cases
typed_runs          configs of runs on rows of each dataset_type; typed_job: what ranks run of them
mesh_job            the groups of ranks of some meshes
unshared_job        a run of which each rank has a folder of its own for checkpoints
failing_job         a run of which a rank fails
environment_job     what a rank is given; waiting_job: ranks that wait

What needs an interpreter that starts anew, or torchrun itself, is shown with real torchrun: test_torchrun (kill -9 and
resumption through `lmms-stream train`), test_stopping (SIGTERM to torchrun, SIGTERM to its ranks, ranks that fail, die
or stand still), tests/demo (kill -9, then two ranks and one) and tests/docs/test_pages.py (two ranks, then one).
"""
