"""Steps -> what a run tells of itself.

meter       what steps take and wait; metrics: counts -> figures
spikes      figures that are out of the ordinary; alerts: what a run warns of, with packs and samples
origins         samples -> the rows that they were made of, for alerts
engine_figures  the same by LMMS Engine's names
overlong        warnings of samples that no pack can hold
run_log     all that a run shows: records, progress, traces
reporters   where records go
train_log   the log, a record a line, written and read; kept_log: kept beside checkpoints
progress    a bar, or a line now and then
profiling   traces of some steps
compilations  graphs that were compiled, and a warning of too many
step_costs  collectives of a step, and reads for which the host waits
standstill  the stacks of ranks that do not move; rank_states: which of them the others wait for
"""
