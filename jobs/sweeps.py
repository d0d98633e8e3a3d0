"""Sweeps, for `submit` and `resume`: the runs that a sweep is made of, and their further job arrays."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.errors import UserError

if TYPE_CHECKING:
    from trainkit.config.loading import Loaded
    from trainkit.launch.plan import Plan
    from trainkit.run.folder import RunDir
    from trainkit.site.profile import Site

MOST = 10_000
"""Runs of one sweep: more are a slip of the pen."""
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(\d+))?")


def sweep_points(sweeps: Sequence[str]) -> list[list[str]]:
    """Overrides of every run: the product of all sweeps; one empty list without any."""
    axes = []
    for text in sweeps:
        key, equals, values = text.partition("=")
        if not equals or not values:
            raise UserError(
                f"--sweep {text!r} has no values.",
                why="It takes KEY=A,B,C, or KEY=0..4 for whole numbers from 0 to 4.",
                fix="For example --sweep optim.lr=1e-3,3e-3 --sweep seed=0..4.",
            )
        if key.startswith("launch."):
            raise UserError(
                "A sweep cannot change resources.", why="All its runs are one job array.", fix="Submit them one by one."
            )
        axes.append([f"{key}={value}" for value in _values(text, values)])
    count = 1
    for axis in axes:
        count *= len(axis)
    if count > MOST:
        raise UserError(
            f"The sweep has {count} runs.", why=f"A sweep has {MOST} at most.", fix="Give fewer values, or fewer keys."
        )
    return [list(point) for point in itertools.product(*axes)]


def _values(sweep: str, text: str) -> list[str]:
    """``0..4`` is 0,1,2,3,4, both ends included; ``0..8..4`` is 0,4,8."""
    found = []
    for item in text.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            if re.fullmatch(r"[\d.eE+-]+\.\.[\d.eE+-]+", item):
                raise UserError(
                    f"--sweep {sweep!r} has a range of other than whole numbers.",
                    why="Between such numbers there are too many.",
                    fix="Name them: --sweep optim.lr=1e-4,3e-4,1e-3.",
                )
            found.append(item)
            continue
        first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
        if first > last or step == 0 or (last - first) // step >= MOST:
            raise UserError(
                f"--sweep {sweep!r} has no such range.",
                why=f"A range goes up, in steps of 1 or more, and has {MOST} values at most.",
                fix="For example seed=0..4, or 0..8..2 for every second.",
            )
        found += [str(number) for number in range(first, last + 1, step)]
    return found


@dataclass(frozen=True)
class Further:
    """What further arrays of a sweep share."""

    sweep: Path
    loaded: Loaded
    site: Site
    cwd: Path
    env: Mapping[str, str]

    def plan(self, runs: Sequence[RunDir], *, after: str = "") -> tuple[Path, Plan, str | None]:
        """Folder, plan and script of one more array of these runs, or of the only one's job. Writes nothing.

        Args:
            after: a job that must have ended before.
        """
        from jobs.starting import by_names
        from trainkit.launch import submission
        from trainkit.launch.plan import make_plan, waiting_for
        from trainkit.schedulers.base import named

        folder = runs[0].path if len(runs) == 1 else submission.part_folder(self.sweep)
        plan = by_names(make_plan(self.loaded, self.site, folder, points=len(runs)), self.env)
        if after:
            plan = waiting_for(plan, after, "--max-parallel is for all arrays together")
        return folder, plan, named(plan.executor).script(plan, folder, self.cwd, len(runs))

    def start(self, runs: Sequence[RunDir], *, after: str = "") -> list[str]:
        """Queue them; the job ids."""
        from jobs.train import run_rank
        from trainkit.launch import submission
        from trainkit.schedulers.base import named

        folder, plan, script = self.plan(runs, after=after)
        submission.require_executor(plan, self.site)
        if len(runs) > 1:
            submission.link_runs(folder, runs)
        submission.write_launch(folder, plan, script)
        return named(plan.executor).submit(folder, runs, plan, run_rank, cwd=self.cwd, env=self.env)

    def start_all(self, runs: Sequence[RunDir], largest: int, *, after: str = "") -> Iterator[tuple[str, list[RunDir]]]:
        """Queue them as arrays of at most ``largest`` tasks; id and runs of each. With --max-parallel one by one."""
        from trainkit.launch.submission import split

        for part in split(runs, largest):
            array = self.start(part, after=after)[0].partition("_")[0]
            after = array if self.loaded.config.launch.max_parallel else ""
            yield array, part
