"""Steps -> what a run reports.

metrics     counts and times of steps, too many compilations -> figures, by our names and LMMS Engine's
rank_figures    figures of this rank, at any time; slow parts of a run -> alerts
exporter    these figures for Prometheus and OpenTelemetry
alerts      unusual figures -> warnings, with packs, samples and source rows
left_out    warnings of samples left out, or too long for a pack
run_log     output of a run: records, progress, traces, reporters, the log next to checkpoints
train_log   the log, a record a line, written and read
standstill  stacks of stalled ranks, and the ranks holding up the run
"""
