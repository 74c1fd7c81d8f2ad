"""LMMS Engine's launcher and launch files."""
