"""How one model becomes a model on many ranks: one file a strategy.

Its function ``build(dist, *, <options>)`` gives a `Strategy`. What others must know of it without loading it the file
states: ``RANKS = "one"``, ``GPUS_PER_RANK = "all"``, ``LOOP = "collaborative"`` (see `trainkit.config.traits`).
"""
