"""The compiled loops of packing and assignment: integers in arrays, no Python objects."""
