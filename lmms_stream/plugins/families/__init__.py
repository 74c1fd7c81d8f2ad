"""Families of models with images, videos and sound: a file each, with a FAMILY; see processors/families/registry.py.

tiles       shared code of families whose towers read square tiles
omni        shared code of the families of text, images, videos and sound
"""
