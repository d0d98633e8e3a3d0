"""Does it help here? Arms side by side: one job that trains a little in each of several ways, in turns.

`arms` holds the benches, `results` what samples come to; neither imports torch. `run` drives the job and measures.
"""
