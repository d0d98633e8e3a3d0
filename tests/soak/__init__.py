"""A training on a real cluster, interrupted again and again: ``python -m tests.soak --interruptions 100 --seed 1``.

Each interruption is of some kind (`strikes.KINDS`), at some moment (`strikes.MOMENTS`), with a scheduler that answers,
fails, or acts and loses its answer. They come from a shuffled bag, so that each kind comes at each moment.

In the end the weights must be those of a run that nobody has interrupted; `checks` says what else. What ends the run
altogether (its budget of failures, its batch script killed) is resumed, and said.
"""
