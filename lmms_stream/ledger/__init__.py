"""What a run has read and will read, without its logs. checkpoint, or config -> stretches of the run -> entries.

planned         a run's file -> its datasets and settings, before it begins
opening         what the user names -> the history of a run, and its settings
stretches       a history -> the plans of the run's datasets, opened
origins         samples <-> the rows of sources that they were made of, and their names in another dataset
ends            where a run ends, by its settings and what its sources have left
amounts         samples and tokens of each source that were read, or were not, up to a step
padding         samples that steps read as padding, because they are left out
retrain         the first step that was trained on some samples, and the checkpoint before it
remix           what a run reads of each source once its settings are changed
run             Ledger: steps, samples and amounts of a run
logged          LoggedLedger: what the log of a run in lanes says instead
"""
