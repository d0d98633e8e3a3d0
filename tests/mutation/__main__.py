"""``python -m tests.mutation [MODULE...]``: which changes of the core modules tests and types notice, and which not."""

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # before torch: a fork inherits no threads

from tests.mutation.modules import MODULES, tests_of
from tests.mutation.mutants import Mutant, is_equivalent, mutants_of
from tests.mutation.reached import tests_that_reach
from tests.mutation.typed import Types
from tests.mutation.warm import AverageTrial, make_copy, warm_up


def main(argv: list[str]) -> int:
    """0 if enough mutants were killed, 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="its name or path (default: all core modules)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants that are tried side by side")
    parser.add_argument("--sample", type=int, metavar="N", help="try N mutants of a module, by chance (default: all)")
    parser.add_argument("--at-least", type=float, default=90.0, metavar="PERCENT", help="fail below this")
    asked = parser.parse_args(argv)
    chosen = [path for path in MODULES if not asked.modules or any(_names(name, path) for name in asked.modules)]
    if not chosen:
        parser.error(f"no such core module; there are: {', '.join(Path(path).stem for path in MODULES)}")
    warm_up()
    killed_of_all = tried_of_all = 0
    rows = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mutation-")))
        copies = [make_copy(scratch / str(number)) for number in range(asked.jobs)]
        types = Types(make_copy(scratch / "types"))
        stack.callback(types.stop)
        for module in chosen:
            began = time.monotonic()
            every = mutants_of(module)
            tried = [mutant for mutant in every if not is_equivalent(mutant)]
            equivalent = len(every) - len(tried)
            if asked.sample is not None and asked.sample < len(tried):
                tried = random.Random(0).sample(tried, asked.sample)
            untested = mistyped = 0
            for mutant in _survivors(module, tried, copies):
                untested += 1
                if types.notice(module, mutant.source):
                    mistyped += 1
                else:
                    print(f"survived: {mutant}", flush=True)
            killed = len(tried) - untested + mistyped
            killed_of_all, tried_of_all = killed_of_all + killed, tried_of_all + len(tried)
            rows.append(
                f"{module:40} {len(tried):5} mutants {killed:5} killed {_percent(killed, len(tried)):6.1f} %"
                f" {mistyped:4} of them by types"
                f" {equivalent:3} equivalent {time.monotonic() - began:6.0f} s"
            )
            print(rows[-1], flush=True)
    share = _percent(killed_of_all, tried_of_all)
    if len(rows) > 1:
        print("\n".join(["", *rows]))
    print(f"{killed_of_all} of {tried_of_all} mutants killed: {share:.1f} %")
    return 0 if share >= asked.at_least else 1


def _names(name: str, path: str) -> bool:
    return name in (path, Path(path).stem)


def _percent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 100.0


def _survivors(module: str, mutants: list[Mutant], copies: list[Path]) -> Iterator[Mutant]:
    """The mutants that no test noticed, as they are found."""
    code = _wait(AverageTrial.start(copies[0], module, None, tests_of(module), seconds=900.0))
    if code != 0:
        print((copies[0] / "output.txt").read_text(encoding="utf-8", errors="replace"), file=sys.stderr)
        print(f"The tests of {module} fail without any mutation.", file=sys.stderr)
        raise SystemExit(1)
    tests = tests_that_reach(module, copies[0])
    waiting, running = list(reversed(mutants)), list[tuple[AverageTrial, Mutant]]()
    free = list(copies)
    while waiting or running:
        while waiting and free:
            mutant = waiting.pop()
            names, seconds = tests(mutant.line)
            running.append((AverageTrial.start(free.pop(), module, mutant.source, names, 10.0 + 5.0 * seconds), mutant))
        time.sleep(0.02)
        for trial, mutant in list(running):
            ended = trial.ended()
            if ended is not None:
                running.remove((trial, mutant))
                free.append(trial.copy)
                if ended == 0:
                    yield mutant


def _wait(trial: AverageTrial) -> int:
    while (ended := trial.ended()) is None:
        time.sleep(0.02)
    return ended


if __name__ == "__main__":
    try:
        ended = main(sys.argv[1:])
    except SystemExit as end:
        ended = end.code if isinstance(end.code, int) else 1
    sys.stdout.flush()
    os._exit(ended)  # past the complaints of libraries that are unloaded
