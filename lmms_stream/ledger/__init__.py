"""What a run has read and will read, without its logs. checkpoint -> stretches of the run -> entries.

stretches       what a checkpoint keeps of the settings of a run -> its plans, opened
amounts         samples and tokens of each source that were read, or were not, up to a step
run             Ledger: steps, samples and amounts of a run
"""
