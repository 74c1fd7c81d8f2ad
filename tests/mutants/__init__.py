"""One-line faults of the product (mutants), drawn by a seed, and the tests that notice them: `make mutants`.

operators   source -> the places of a file at which one of ten operators applies
table       rooms, seed -> twelve mutants a room; mutants.json holds them with their verdicts
copies      copies of the project that a fault can be written into
tracing     the tests that execute the line of a mutant
run         mutants -> the first test that fails with each
__main__    the commands: draw, run
"""
