"""Which tests reach which line of a module: a mutant of that line meets them alone, the fastest first."""

import ast
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from pathlib import Path

import coverage
import pytest

NOTES = "reached.json"


class Reached:
    """A plugin of pytest that notes for each test which lines of a module it runs.

    What ranks run in a fork is not seen: a test that forks may reach any line.
    """

    def __init__(self, copy: Path, module: str) -> None:
        self._notes, self._file = copy / NOTES, str(copy / module)
        self._seconds: dict[str, float] = {}
        self._forking, self._test = set[str](), ""
        os.register_at_fork(after_in_parent=lambda: self._forking.add(self._test))
        self._coverage = coverage.Coverage(data_file=None, include=[self._file], config_file=False)
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        from tests.fork_server import server  # of the copy, whose tests call it

        self._test = item.nodeid
        self._coverage.switch_context(item.nodeid)
        began, calls = time.monotonic(), server().calls
        result = yield
        self._seconds[item.nodeid] = time.monotonic() - began
        if server().calls > calls:
            self._forking.add(item.nodeid)
        self._coverage.switch_context("")
        return result

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        tests = defaultdict[int, list[str]](list)
        for line, names in self._coverage.get_data().contexts_by_lineno(self._file).items():
            tests[line] += filter(None, names)
        notes = {"seconds": self._seconds, "tests": tests, "forking": sorted(self._forking & self._seconds.keys())}
        self._notes.write_text(json.dumps(notes), encoding="utf-8")


def tests_that_reach(module: str, copy: Path) -> Callable[[int], tuple[tuple[str, ...], float]]:
    """Of a line: the tests that run the statement it belongs to, and the seconds that they took.

    All tests where none reaches it, or it runs at import.
    """
    notes = json.loads((copy / NOTES).read_text(encoding="utf-8"))
    tree = ast.parse((copy / module).read_text(encoding="utf-8"))
    spans = [range(node.lineno, (node.end_lineno or 0) + 1) for node in ast.walk(tree) if isinstance(node, ast.stmt)]

    def tests(line: int) -> tuple[tuple[str, ...], float]:
        statement = min((span for span in spans if line in span), key=len, default=range(0))
        reaching = {name for number in statement for name in notes["tests"].get(str(number), ())}
        chosen = reaching.union(notes["forking"]) if reaching else notes["seconds"]
        return tuple(sorted(chosen, key=notes["seconds"].__getitem__)), sum(notes["seconds"][name] for name in chosen)

    return tests
