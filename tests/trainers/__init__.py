"""A PackedLoader in a loop of one's own and in other projects' trainers.

programs        one run by each of them: `python -m tests.trainers.programs KIND FOLDER STEPS`
test_trainers   each is killed, resumes on another number of ranks, and gives the samples and losses of the plain loop
"""
