"""What people use around a run, each with its commands. The core imports none of them.

inspect     the content of a stored dataset
plan        what a run will read, before it starts, and after a change of settings
simulate    what a cluster will do with a plan
profile     the part of a run that limits it
watch       the log of a run as it grows
ledger      past and future samples of a run
demo        `make demo`
"""
