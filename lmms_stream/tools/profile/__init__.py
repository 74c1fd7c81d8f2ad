"""A run's config -> the part of the run that limits it: data, model, or what they share.

rates       measured rates: the loader, the model, both; rates -> the limit, by how much, and what to change. Pure
measure     a trainer -> its rates; nothing is written, saved or resumed
"""
