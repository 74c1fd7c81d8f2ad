"""Steps -> what a run reports.

metrics     counts and times of steps, too many compilations -> figures, by our names and LMMS Engine's
alerts      unusual figures -> warnings, with packs, samples and source rows
left_out    warnings of samples that are left out, or too long for a pack
run_log     all that a run shows: records, progress, traces, reporters, the log next to checkpoints
train_log   the log, a record a line, written and read
step_costs  collectives of a step, and reads for which the host waits
standstill  the stacks of ranks that do not move, and the ranks that others wait for
"""
