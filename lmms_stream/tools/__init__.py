"""Tools around a run, each with its commands. The core does not import tools.

inspect     the content of a stored dataset
audit       faults of supervision in datasets
plan        reads of a run, before the start and after a change of settings
simulate    a plan on a simulated cluster
profile     the limiting part of a run
watch       the growing log of a run
ledger      past and future samples of a run
demo        `make demo`
"""
