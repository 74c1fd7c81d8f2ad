"""LMMS Engine's launcher."""
