"""Does it help here? Arms side by side: one job that trains a little in each of several ways, in turns.

`catalogue` lists the benches, and `results` computes figures from samples; neither imports torch. `job` is what each
rank runs: rank 0 drives the arms (`driver`), and all ranks measure (`rank`).
"""
