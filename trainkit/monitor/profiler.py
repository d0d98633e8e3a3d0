"""``RUN/profile/``: profiles of some updates of rank 0, by torch.profiler, and the GPU's memory when it ran out.

A profile is of the updates that ``monitor.profile_steps`` names or, while a run goes on, of the next few after
``touch RUN/PROFILE``; that file is removed when the profile is written. A profile is two files: a trace for
https://ui.perfetto.dev or chrome://tracing, and a table of the operations that cost most. Another thread looks for the
request and writes the files, so that training waits for no disk.

A snapshot of the GPU's memory is for https://pytorch.org/memory_viz. It is a pickle, because torch's viewer wants one;
trainkit never reads it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from trainkit import fileio
from trainkit.run.folder import RunDir

if TYPE_CHECKING:
    from torch.profiler import profile

ON_REQUEST = 5
"""Updates of a requested profile."""
LOOK_SECONDS = 2.0
_ROWS = 40
_MOST_MEMORY_EVENTS = 100_000
_NEVER = -1


class Profiler:
    """Begins and ends profiles when the loop calls it.

    Args:
        steps: begin after the first of these updates, end after the second.
    """

    def __init__(self, run_dir: RunDir, steps: tuple[int, int] | None, *, gpu: bool) -> None:
        self._run_dir, self._steps, self._gpu = run_dir, steps, gpu
        self.next = steps[0] if steps else _NEVER
        """The step at which to call `turn`."""
        self.requested = threading.Event()
        self._running: tuple[int, profile] | None = None
        self._writing: threading.Thread | None = None

    def look(self, step: int) -> None:
        """Begin with the next update, if a profile is requested."""
        if self.requested.is_set() and self._running is None and self._writing is None:
            self.next = step

    def turn(self, step: int) -> None:
        """Begin a profile, or end the one that runs. A failure is reported once and does not fail the training."""
        try:
            if self._running is None:
                self._begin(step)
            else:
                self._end(step)
        except Exception as error:
            self._running, self.next = None, _NEVER
            _no_profile(error)

    def close(self, step: int) -> None:
        """End the profile that runs, and wait until it is written."""
        if self._running is not None:
            self.turn(step)
        if self._writing is not None:
            self._writing.join()

    def _begin(self, step: int) -> None:
        from torch.profiler import ProfilerActivity, profile

        running = profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._gpu)
        running.start()
        self._running = (step, running)
        is_planned = self._steps is not None and step == self._steps[0]
        self.next = self._steps[1] if self._steps is not None and is_planned else step + ON_REQUEST

    def _end(self, step: int) -> None:
        assert self._running is not None
        (began, running), self._running = self._running, None
        self.next = self._steps[0] if self._steps is not None and self._steps[0] > step else _NEVER
        running.stop()
        name = f"steps-{began:08}-{step:08}-rank-0"
        self._writing = threading.Thread(target=self._write, args=(running, name), name="profile")
        self._writing.start()

    def _write(self, running: profile, name: str) -> None:
        folder, run = self._run_dir.profile, self._run_dir.path
        try:
            fileio.make_folder(folder, run)
            with fileio.replacing(folder / f"{name}.json.gz", run) as out:
                running.export_chrome_trace(out.name)
            sort_by = "self_device_time_total" if self._gpu else "self_cpu_time_total"
            fileio.write(folder / f"{name}.txt", running.key_averages().table(sort_by=sort_by, row_limit=_ROWS), run)
            print(f"Profile: {folder / name}.json.gz", flush=True)
        except Exception as error:
            _no_profile(error)
        with suppress(OSError):  # else it is still there: asking again and again would fill the disk
            self._run_dir.profile_request.unlink(missing_ok=True)
            self.requested.clear()
            self._writing = None


def _no_profile(error: Exception) -> None:
    print(f"No profile: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


@contextmanager
def profiling(run_dir: RunDir, steps: tuple[int, int] | None, *, gpu: bool, is_main: bool = True) -> Iterator[Profiler]:
    """A profiler for a loop, with a thread that looks for requests; it does nothing on other ranks than the first."""
    profiler, over = Profiler(run_dir, steps if is_main else None, gpu=gpu), threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_SECONDS):
            with suppress(OSError):
                if run_dir.profile_request.exists():
                    profiler.requested.set()

    if is_main:
        threading.Thread(target=watch, name="profile-request", daemon=True).start()
    try:
        yield profiler
    finally:
        over.set()


@contextmanager
def snapshot_on_oom(run_dir: RunDir, rank: int, *, gpu: bool, history: bool) -> Iterator[None]:
    """Write ``RUN/profile/oom-rank-<n>.pickle`` if the body runs out of the GPU's memory.

    Args:
        history: record from now on which line of Python allocated what. Without it the snapshot has only the blocks
            that are held at the end, and how full they are.
    """
    if not gpu:
        yield
        return
    import torch

    if history:
        torch.cuda.memory._record_memory_history(max_entries=_MOST_MEMORY_EVENTS, stacks="python")
    try:
        yield
    except BaseException as error:
        if out_of_gpu_memory(error):
            file = run_dir.profile / f"oom-rank-{rank}.pickle"
            try:
                fileio.make_folder(run_dir.profile, run_dir.path)
                with fileio.replacing(file, run_dir.path) as out:
                    torch.cuda.memory._dump_snapshot(out.name)
                print(f"What the GPU's memory held: {file}", file=sys.stderr, flush=True)
            except Exception as problem:  # the error that ends the run must be the one that is seen
                print(f"No snapshot of the GPU's memory: {problem}", file=sys.stderr, flush=True)
        raise


def out_of_gpu_memory(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, is torch's that the GPU's memory is too small."""
    import torch

    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        error = error.__cause__ or error.__context__
    return any(isinstance(item, torch.OutOfMemoryError) for item in seen)
