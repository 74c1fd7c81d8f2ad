"""A run's config -> which part of the run is its limit: its data, its model, or what they share.

rates       what was measured: the loader alone, the model alone, both; cpu_time: of a rank's loader workers
verdict     rates -> which part is the limit, by how much, and what to change. Pure
measure     a trainer -> its rates; nothing is written, saved or resumed
"""
