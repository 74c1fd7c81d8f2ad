"""What differs between the versions of the libraries that may be installed. A file a library.

numba           compiled loops, and the files of their machine code
transformers    where processors find settings, what they cut of sounds, positions of models
"""
