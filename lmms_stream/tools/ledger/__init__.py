"""Past and future samples of a run, without its logs. checkpoint, or config -> segments of the run -> entries.

opening         what the user names -> the history of a run, and its settings; a run's file, before the run; the first
                step that was trained on given samples, and the checkpoint before it; what a run wrote of its steps,
                compared with its plan
origins         samples <-> rows of their sources, and their names in another dataset
amounts         samples and tokens of each source before a step; the end of a run
remix           what a run reads of each source after a change of settings
run             Ledger: steps, samples and amounts of a run; LoggedLedger: the same of a run in lanes, from its log;
                a history -> the plans of the run's datasets
"""
