"""Loops over numbers, compiled ahead from C: arrays and numbers in, numbers written to arrays out.

loops           the extension module; loops.c names its functions
core.h          declarations; arguments.c checks the types and sizes of all arguments, and frees memory
best_fit.c      packs; window_fit.c, even_fit.c and short_epochs.c use its bins
turns.c, deal.c sources that take turns; packs of a step -> ranks
tokens.c        stored samples -> rows of a batch; media.c: pixels
simulate.c      caches and links of a simulated cluster; repeats.c: sketches of samples
"""
