"""``RUN/profile/``: profiles of some updates of rank 0, by torch.profiler, and the GPU's memory when it ran out.

A profile is of the updates that ``monitor.profile_steps`` names or, while a run goes on, of the next few after
``touch RUN/PROFILE``; that file is removed when the profile is written. A profile is two files: a trace for
https://ui.perfetto.dev or chrome://tracing, and a table of the operations that cost most. Training waits while they are
written.

A snapshot of the GPU's memory is for https://pytorch.org/memory_viz. It is a pickle, because torch's viewer wants one;
trainkit never reads it.
"""

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trainkit.common import fileio, terminal
from trainkit.common.accelerators import CPU, TELLS_ALLOCATIONS, Kind
from trainkit.run.folder import RunDir

if TYPE_CHECKING:
    from torch.profiler import profile

ON_REQUEST = 5
"""Updates of a requested profile."""
LOOK_SECONDS = 2.0
"""Between two looks for a request, at least."""
_ROWS = 40
_MOST_MEMORY_EVENTS = 100_000
_NEVER = -1


class Profiler:
    """Begins and ends profiles when the loop calls it.

    Args:
        steps: begin after the first of these updates, end after the second.
        is_main: whether this is the rank that is profiled.
    """

    def __init__(self, run_dir: RunDir, steps: tuple[int, int] | None, *, is_main: bool = False) -> None:
        self._run_dir = run_dir
        self._begins = _NEVER
        self._ends = _NEVER
        if is_main and steps is not None:
            self._begins, self._ends = steps
        self.next = self._begins
        """The step at which to call `turn`."""
        self._running: tuple[int, profile] | None = None
        self._looks_at = 0.0 if is_main else math.inf
        """When to look for a request again, by the monotonic clock."""

    def look(self, step: int) -> None:
        """Begin with the next update, if a profile is requested."""
        now = time.monotonic()
        if self._running is None and now >= self._looks_at:
            self._looks_at = now + LOOK_SECONDS
            if os.path.exists(self._run_dir.profile_request):  # False where the disk gives an error
                self.next = step

    def turn(self, step: int) -> None:
        """Begin a profile, or end the one that runs. A failure is reported once and does not fail the training."""
        try:
            if self._running is None:
                self._begin(step)
            else:
                self._end(step)
        except Exception as error:
            self._running = None
            self.next = _NEVER
            terminal.warn(f"No profile: {type(error).__name__}: {error}")

    def close(self, step: int) -> None:
        """End the profile that runs."""
        if self._running is not None:
            self.turn(step)

    def _begin(self, step: int) -> None:
        from torch.profiler import profile

        running = profile()  # of all that this torch can look at
        running.start()
        self._running = (step, running)
        self.next = self._ends if step == self._begins else step + ON_REQUEST

    def _end(self, step: int) -> None:
        from torch.profiler import supported_activities

        assert self._running is not None
        began, running = self._running
        self._running = None
        self.next = self._begins if self._begins > step else _NEVER
        running.stop()
        folder = self._run_dir.profile
        run = self._run_dir.path
        name = f"steps-{began:08}-{step:08}-rank-0"
        try:
            fileio.make_folder(folder, run)
            with fileio.replacing(folder / f"{name}.json.gz", run) as out:
                running.export_chrome_trace(out.name)
            sort_by = "self_device_time_total" if len(supported_activities()) > 1 else "self_cpu_time_total"
            fileio.write(folder / f"{name}.txt", running.key_averages().table(sort_by=sort_by, row_limit=_ROWS), run)
            terminal.say(f"Profile: {folder / name}.json.gz")
        finally:
            try:
                self._run_dir.profile_request.unlink(missing_ok=True)
            except OSError:  # it is still there: profile after profile would fill the disk
                self._looks_at = math.inf


@contextmanager
def snapshot_on_oom(run_dir: RunDir, rank: int, kind: Kind, *, history: bool) -> Iterator[None]:
    """Write ``RUN/profile/oom-rank-<n>.pickle`` if the body runs out of the GPU's memory; where torch has no record of
    its blocks, ``.json`` with the statistics of its allocator.

    Args:
        history: record from now on which line of Python allocated what. Without it the snapshot has only the blocks
            that are held at the end, and how full they are.
    """
    if kind is CPU:
        yield
        return
    import torch

    module = torch.get_device_module(kind.device_type)
    dumps = kind.has(TELLS_ALLOCATIONS)
    if history and dumps:
        module.memory._record_memory_history(max_entries=_MOST_MEMORY_EVENTS, stacks="python")
    try:
        yield
    except BaseException as error:
        if out_of_gpu_memory(error):
            file = run_dir.profile / f"oom-rank-{rank}.{'pickle' if dumps else 'json'}"
            try:
                fileio.make_folder(run_dir.profile, run_dir.path)
                if dumps:
                    with fileio.replacing(file, run_dir.path) as out:
                        module.memory._dump_snapshot(out.name)
                else:
                    told = json.dumps(torch.accelerator.memory_stats(), indent=1)
                    fileio.write(file, f"{told}\n", run_dir.path)
                terminal.warn(f"Contents of the GPU's memory: {file}")
            except Exception as problem:  # the error that ends the run must be the one that is seen
                terminal.warn(f"No snapshot of the GPU's memory: {problem}")
        raise


def out_of_gpu_memory(error: BaseException | None) -> bool:
    """True if an error, or one of its causes, is torch's that the GPU's memory is too small."""
    import torch

    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        error = error.__cause__ or error.__context__
    return any(isinstance(item, torch.OutOfMemoryError) for item in seen)
