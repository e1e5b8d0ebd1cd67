"""Compiled loops over host memory: rows of an exchange, and weights that are ordered, cast and summed.

Any thread; the GIL is released meanwhile. Here are the types of what `cython_ext` makes, and `native`, which loads it.
No engine, no fabric and nothing that waits.
"""
