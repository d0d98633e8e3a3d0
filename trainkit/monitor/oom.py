"""What the GPU's memory held when there was too little of it: a snapshot for https://pytorch.org/memory_viz.

It is a pickle, as torch's own viewer wants it. Nothing of ours ever reads it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from trainkit import fileio
from trainkit.run.folder import RunDir

_MOST_EVENTS = 100_000


@contextmanager
def snapshot_on_oom(run_dir: RunDir, rank: int, *, gpu: bool, history: bool) -> Iterator[None]:
    """Write ``RUN/profile/oom-rank-<n>.pickle`` if the body runs out of the GPU's memory.

    Args:
        history: note from now on which line of Python has asked for what. Without it the snapshot has what is held at
            the end, in which blocks and how full.
    """
    if not gpu:
        yield
        return
    import torch

    if history:
        torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS, stacks="python")
    try:
        yield
    except BaseException as error:
        if out_of_memory(error):
            file = run_dir.profile / f"oom-rank-{rank}.pickle"
            try:
                fileio.make_folder(run_dir.profile, run_dir.path)
                with fileio.replacing(file, run_dir.path) as out:
                    torch.cuda.memory._dump_snapshot(out.name)
                print(f"What the GPU's memory held: {file}", file=sys.stderr, flush=True)
            except Exception as problem:  # the error that ends the run must be the one that is seen
                print(f"No snapshot of the GPU's memory: {problem}", file=sys.stderr, flush=True)
        raise


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, is that the GPU's memory is too small."""
    import torch

    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
