"""Files that commit 67b50f60 wrote, and the values that it computed; every later commit must read them alike.

stored/ holds small datasets, processors, states, checkpoints, ledgers, configs and digests of packs. make.py wrote it
at 67b50f60, with the cases of pack_cases, state_cases, datasets, run_cases and config_cases. The tests use the same
cases. A test that fails shows that a stored file is read in another way than before: change the code, not the files.
"""
