"""What the operations of some updates cost, by torch.profiler: into ``RUN/profile/``, of rank 0.

Either of those that ``monitor.profile_steps`` names, or, for a run that goes on, of the next few after somebody has
said ``touch RUN/PROFILE``; the file is taken away when the profile is there. A profile is two files: a trace for
https://ui.perfetto.dev or chrome://tracing, and a table of the operations that cost most.

A thread of its own looks for the request and writes the files, so that training waits for no disk.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit import fileio
from trainkit.run.folder import RunDir

if TYPE_CHECKING:
    from torch.profiler import profile

ON_REQUEST = 5
"""Updates of a profile that somebody has asked for."""
LOOK_SECONDS = 2.0
_ROWS = 40
_NEVER = -1


class Profiler:
    """Begins and ends profiles where the loop says that it is there.

    Args:
        steps: begin after this update, end after that one.
    """

    def __init__(self, run_dir: RunDir, steps: tuple[int, int] | None, *, gpu: bool) -> None:
        self._run_dir, self._steps, self._gpu = run_dir, steps, gpu
        self.next = steps[0] if steps else _NEVER
        """The step at which `turn` is to be called."""
        self.requested = threading.Event()
        self._running: tuple[int, profile] | None = None
        self._writing: threading.Thread | None = None

    def look(self, step: int) -> None:
        """If somebody has asked for a profile, begin with the next update."""
        if self.requested.is_set() and self._running is None and self._writing is None:
            self.next = step

    def turn(self, step: int) -> None:
        """Begin, or end what has begun. Failing is said once, and no reason for a training to fail."""
        try:
            if self._running is None:
                self._begin(step)
            else:
                self._end(step)
        except Exception as error:
            self._running, self.next = None, _NEVER
            print(f"No profile: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    def close(self, step: int) -> None:
        """End what has begun, and wait until it is written."""
        if self._running is not None:
            self.turn(step)
        if self._writing is not None:
            self._writing.join()

    def _begin(self, step: int) -> None:
        from torch.profiler import ProfilerActivity, profile

        planned = self._steps is not None and step == self._steps[0]
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._gpu
        running = profile(activities=activities)
        running.start()
        self._running = (step, running)
        self.next = self._steps[1] if planned and self._steps is not None else step + ON_REQUEST

    def _end(self, step: int) -> None:
        assert self._running is not None
        (began, running), self._running = self._running, None
        self.next = self._steps[0] if self._steps is not None and self._steps[0] > step else _NEVER
        running.stop()
        name = f"steps-{began:08}-{step:08}-rank-0"
        self._writing = threading.Thread(target=self._write, args=(running, name), name="profile")
        self._writing.start()

    def _write(self, running: profile, name: str) -> None:
        folder = self._run_dir.profile
        try:
            fileio.make_folder(folder, self._run_dir.path)
            trace, table = folder / f"{name}.json.gz", folder / f"{name}.txt"
            with fileio.replacing(trace, self._run_dir.path) as out:
                running.export_chrome_trace(out.name)
            sort_by = "self_device_time_total" if self._gpu else "self_cpu_time_total"
            costs = running.key_averages().table(sort_by=sort_by, row_limit=_ROWS)
            fileio.write(table, costs, self._run_dir.path)
            print(f"Profile: {trace}", flush=True)
        except Exception as error:
            print(f"No profile: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        try:
            self._run_dir.profile_request.unlink(missing_ok=True)
        except OSError:
            return  # it is still there: asking again and again would fill the disk
        self.requested.clear()
        self._writing = None


@contextmanager
def profiling(run_dir: RunDir, steps: tuple[int, int] | None, *, gpu: bool, is_main: bool = True) -> Iterator[Profiler]:
    """A profiler for a loop, with a thread that looks for requests; on other ranks than the first it does nothing."""
    if not is_main:
        yield Profiler(run_dir, None, gpu=gpu)
        return
    profiler, over = Profiler(run_dir, steps, gpu=gpu), threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_SECONDS):
            if _is_there(run_dir.profile_request):
                profiler.requested.set()

    threading.Thread(target=watch, name="profile-request", daemon=True).start()
    try:
        yield profiler
    finally:
        over.set()


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False
