"""Differences between installed versions of libraries. A file per library.

transformers    names of settings and arguments, weights in files, masks, positions
"""
