"""`lmms-stream plan`: datasets, or a run's file -> packs, steps and shares, without reading a sample.

command     the command
report      figures of a plan
console     their tables; what a run reads after a change of settings
"""
