"""Guard of tests with several ranks: the sequence of collectives of each rank, compared between ranks.

A rank waits for ever, or takes another rank's values, if ranks do not call the same collectives of a process group in
the same order. The guard logs each collective of a rank, a file for each group, and compares it with the other ranks'
files as it is called: the first difference ends the rank, and fails the test with both lines. Ranks exchange only these
files, and the name of their folder, in the store of the process group.

FOLDER in the environment switches the guard on: tests/conftest.py sets it, and the path of sitecustomize.py for new
interpreters. Outside of tests: LMMS_STREAM_COLLECTIVES=FOLDER PYTHONPATH=tests/guard torchrun ….

sitecustomize       new interpreters: begins once torch.distributed is imported
collective_log      the log and the comparison
"""
