"""Differences between installed versions of libraries. A file per library.

numba           compiled loops, and the files of their machine code
transformers    names of settings and arguments, weights in files, masks, positions
"""
