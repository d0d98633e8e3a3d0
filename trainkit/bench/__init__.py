"""Does it help here? Arms side by side: one job that trains a little in each of several ways, in turns.

One file a bench, with the arms that it has and what their figures mean; those files, and what is made of samples
(`results`, `table`, `drawing`), do without torch. `job` drives, `team` tells the other ranks, `work` measures.
"""
