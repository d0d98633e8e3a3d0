"""Causes of failed and waiting runs: the row of ``causes.yaml`` that fits, the lines that show it, and its command."""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from trainkit.cluster.scheduler import JobState, built_in
from trainkit.common import terminal
from trainkit.diagnosis import evidence
from trainkit.diagnosis.evidence import Case, Failure, LogSource, Quote
from trainkit.diagnosis.fields import Fields, behind, fields, host_of_task, hosts_of
from trainkit.diagnosis.fixes import TO_FILL_IN, on_every_machine, settings_of, without_foreign_settings
from trainkit.diagnosis.rank_log import WORDS, is_lost_connection, rank_log
from trainkit.run.folder import BENCH, RunDir
from trainkit.run.history import history_of

RESUME = "python -m jobs.resume {run}"
AGAIN = "python -m jobs.submit {run}"
LOG = "python -m jobs.logs {run} --attempt {attempt} --rank {rank} --err"
_COMMANDS = {"RESUME": RESUME, "AGAIN": AGAIN, "LOG": LOG, "WITHOUT": RESUME + " --exclude {host}"}
"""Commands that the rows abbreviate."""
EVERY_NODE = (
    "Every node of the job says so, so it is none of them: look at the environment, the mask and the driver. Then:"
)
_ASKED_FOR = "It asks for that very node (--nodelist): name another, or, when it is well again:"
_EVERYWHERE = "On each of its machines, with its own --node-rank and one secret for all:"
_NO_RESUME = "A bench is not gone on with: start another one. What it has measured:"
_IN_OWN_WORDS = {"exception", "failed", "said-by-the-kit", "no-words"}
"""Answers that repeat what was said, where no row is known."""
_SHOWN = 6
"""Lines of evidence."""
_QUOTED = frozenset({"run", "logs", "there", "more_memory"})
"""Fields that are quoted for a shell already."""


@dataclass(frozen=True)
class CauseRow:
    """A row of ``causes.yaml``, which says what the fields mean."""

    name: str
    seen: frozenset[str]
    says: tuple[str, ...]
    what: str
    command: str
    fix: str = ""
    unless: str = ""
    vague: bool = False
    of_code: bool = False

    def find(self, text: str) -> re.Match[str] | None:
        """The match with the most named groups: which node, which module."""
        matches = [_compiled(pattern).search(text) for pattern in self.says]
        return max(filter(None, matches), key=_named_groups, default=None)

    def match(self, source: LogSource) -> re.Match[str] | None:
        """The place at which a source shows this cause."""
        if source.place == "batch" and source.raised and "rank" in self.seen and "job" not in self.seen:
            return None  # a script grumbles of much that ends no rank; the one that ended has said why
        if source.of_code and not self.of_code:
            return None
        if source.place in self.seen or (source.place == "end" and "rank" in self.seen):
            return self.find(source.text)
        return None

    def is_contradicted(self, texts: Iterable[str]) -> bool:
        return self.unless != "" and any(map(_compiled(self.unless).search, texts))


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Kept here: `re` keeps 512 patterns, and the rows have more, so that each would be compiled for each text."""
    return re.compile(pattern, re.MULTILINE)


def _named_groups(match: re.Match[str]) -> int:
    return len(_named(match))


def _named(match: re.Match[str]) -> dict[str, str]:
    """The fields that a pattern has found."""
    return {name: value.strip().rstrip(".") for name, value in match.groupdict().items() if value}


@cache
def rows() -> tuple[CauseRow, ...]:
    """All rows, in the order in which they are tried. Patterns are compiled when they are first tried."""
    text = Path(__file__).with_name("causes.yaml").read_text("utf-8")
    return tuple(_row(item) for item in yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def _row(item: dict[str, Any]) -> CauseRow:
    says = item.pop("says")
    return CauseRow(
        seen=frozenset(item.pop("seen").split()),
        says=(says,) if isinstance(says, str) else tuple(says),
        command=re.sub(r"\b[A-Z]{3,}\b", lambda word: _COMMANDS.get(word[0], word[0]), item.pop("command")),
        **item,
    )


@dataclass(frozen=True)
class Cause:
    """A cause of what has become of a run, and what to do."""

    name: str
    what: str
    evidence: tuple[Quote, ...]
    fix: str
    """Advice before the command; empty if the command is enough."""
    command: str
    """For a shell."""
    failure: Failure | None
    """The rank that failed first, where one did."""
    why: str = ""
    """The reason in a rank's own words, where it has given one: the kit's own errors do."""
    row: CauseRow | None = None
    """None where no row explains it."""

    @property
    def shown(self) -> str:
        """The rank's own reason, or the lines of evidence, one below the other."""
        if self.why:
            return terminal.one_line(self.why, 2000)
        return evidence.listed(self.evidence)

    def gist(self, run: RunDir) -> tuple[str, str]:
        """Equal for runs that ended for the same reason, wherever that was and whichever rank met it.

        The words and line of an error that no row knows count; the numbers in the sentence of a known cause do not.
        """
        words = self.what.replace(str(run.path), "")
        words = re.sub(r"\b[Rr]ank \d+( on \S+)?|\b0x[0-9a-f]+", "", words)
        if self.failure is not None:
            words = words.replace(self.failure.host, "")
        if self.name not in _IN_OWN_WORDS:
            words = re.sub(r"\d+", "", words)
        return self.name, words

    @property
    def advice(self) -> str:
        """Words and command in one line."""
        return f"{self.fix} `{terminal.for_reader(self.command)}`".strip()

    def __str__(self) -> str:
        """Three lines as of an error: what, why, how to fix it; the evidence may take more."""
        if not self.shown:
            return f"{self.what}\n  fix: {self.advice}"
        return f"{self.what}\n  why: {self.shown}\n  fix: {self.advice}"


def cause_of(run: RunDir, state: JobState, attempt: int | None = None) -> Cause | None:
    """The one cause of what has become of an attempt (the newest if None); None where nothing speaks of one.

    Facts of the machine come first, then what ended or holds the job, then the rank that failed first.

    Args:
        state: of the run's newest job, as `trainkit.cluster.job_states` has it.
    """
    if attempt is None and state.state == "COMPLETED":
        return None
    latest = (run.attempts() or [0])[-1]
    if attempt is None:
        number = latest
        waits = state.alive == "yes" and state.state != "COMPLETING"
        newest = True
    else:
        number = attempt
        waits = False
        newest = state.alive != "yes" and number == latest
    failure = None
    facts = ""
    if not waits:
        failure = evidence.failure_of(run, number)
        facts = evidence.facts_of(run, number)
    tried = rows()
    if attempt is None and state.state == "RUNNING":  # it may wait for a rank that never started
        tried = tuple(row for row in tried if row.name == "launch-failure")
        sources = evidence.of_the_batch(run, number)
    else:
        sources = evidence.sources_of(run, state, number, failure, newest=newest, waits=waits)
    case = Case(run, state, number, failure, sources)
    fit = _first_that_fits(tried, sources, facts)
    if fit is None:
        return _otherwise(case)
    return _explained(case, *fit)


def sentence_for(error: str) -> str:
    """The sentence of the cause that an error's words show, where no run has them; empty if none is known."""
    for row in sorted(rows(), key=attrgetter("vague")):
        if "rank" not in row.seen or row.of_code:
            continue
        match = row.find(error)
        if match and not row.is_contradicted([error]):
            last_line = error.strip().rpartition("\n")[2].rstrip(".")
            known = Fields(who="A rank", on_node="the node", error=last_line)
            known.update(_named(match))
            return row.what.format_map(known)
    return ""


def _first_that_fits(
    tried: Sequence[CauseRow], sources: list[LogSource], facts: str
) -> tuple[CauseRow, re.Match[str], LogSource] | None:
    """Try rows that name a cause before those that name a consequence, and the last words before what led to them."""
    texts = [facts, *(source.text for source in sources)]
    for vague, aside in product((False, True), (False, True)):
        spoken = [source for source in sources if source.aside == aside]
        for row in tried:
            if row.vague != vague:
                continue
            fit = _best_fit(row, spoken)
            if fit is not None and not row.is_contradicted(texts):
                return fit
    return None


def _best_fit(row: CauseRow, sources: list[LogSource]) -> tuple[CauseRow, re.Match[str], LogSource] | None:
    best = None
    for source in sources:
        match = row.match(source)
        if match and (best is None or _named_groups(match) > _named_groups(best[1])):
            best = (row, match, source)
    return best


def _explained(case: Case, row: CauseRow, match: re.Match[str], source: LogSource) -> Cause:
    """The cause that a row names for a case."""
    run = case.run
    groups = _named(match)
    found = fields(case)
    if "{lagging}" in row.command:
        found.update(behind(case))
    found.update(groups)
    is_exit_only = case.failure is None or case.error.endswith(f"(on {case.failure.host})")  # all that srun knows
    if is_exit_only and source.place in ("rank", "batch"):
        found["error"] = source.quote(match.start()).text.rstrip(".")
    fix = row.fix
    if "{host}" in row.command and _is_on_every_node(case, row, found["hosts"]):
        found["host"] = ""
        fix = EVERY_NODE
    if "task" in groups:
        found["unseeing"] = host_of_task(run, found["hosts"], int(groups["task"]))
    if "failed" in groups:
        found["failed_hosts"] = hosts_of(groups["failed"])
    command = _for_shell(row.command, found)
    fix = fix.format_map(found).strip()
    fix = fix[:1].upper() + fix[1:]
    asks = WORDS["asks-slurm"].match(command)
    if asks and asks[1] not in built_in(case.state.executor).tools:  # SLURM knows nothing of a job of this machine
        command = terminal.command("status", run.path)
        fix = ""
    if " --exclude " in command and _asks_for(run, found["failed_hosts"] or found["host"]):
        command = re.sub(r" --exclude \S+", "", command)  # sbatch refuses a node that is asked for and excluded
        fix = _ASKED_FOR
    quotes = _around(case)
    if source.where:
        quotes.insert(0, source.quote(match.start()))
    cause = Cause(row.name, row.what.format_map(found), _once(quotes), fix, command, case.failure, row=row)
    return _where_it_started(run, cause)


def _for_shell(command: str, found: Fields) -> str:
    """The command with its fields, each as one word."""
    quoted = Fields(found)
    for key, text in found.items():
        if text and key not in _QUOTED:
            quoted[key] = shlex.quote(text)
    return re.sub(r" --exclude(?= *$)", "", command.format_map(quoted)).rstrip()  # where no node is known


def _asks_for(run: RunDir, nodes: str) -> bool:
    """True if the run asks by name for one of these nodes."""
    asked_for = hosts_of(run.directive("nodelist"))
    return asked_for != "" and not set(asked_for.split(",")).isdisjoint(hosts_of(nodes).split(","))


def _is_on_every_node(case: Case, row: CauseRow, hosts: str) -> bool:
    """True if a rank of each node of the job, of several, ended with the same: then no single node is to blame."""
    if case.failure is None or "," not in hosts:
        return False
    one_of_each = {host_of_task(case.run, hosts, case.failure.rank): True}
    for rank in evidence.ranks_of(case.run, case.attempt):
        host = host_of_task(case.run, hosts, rank)
        if host not in one_of_each:
            one_of_each[host] = row.find(rank_log(case.run, case.attempt, rank).error) is not None
    return all(one_of_each.get(node, False) for node in hosts.split(","))


def _where_it_started(run: RunDir, cause: Cause) -> Cause:
    """The cause with the command that mends it where the run was started."""
    if "-m jobs.resume " in cause.command and BENCH.at(run.path).is_file():
        return replace(cause, command=terminal.command("bench", "--show", run.path), fix=_NO_RESUME)
    command = cause.command
    if history_of(run).is_script:
        command = without_foreign_settings(command)
        cause = replace(cause, command=command)
    command = on_every_machine(run, command)
    if command == cause.command:
        return cause
    return replace(cause, command=command, fix=f"{cause.fix.rstrip(':')}. {_EVERYWHERE}".lstrip(". "))


def _otherwise(case: Case) -> Cause | None:
    """A cause that no row knows: our own three lines, an exception, a lost connection, or silence."""
    failure = case.failure
    if failure is None:
        return _silent(case)
    quotes = _once(_around(case))
    if len(failure.traceback) > 1 and failure.traceback[1].startswith("  why: "):
        return _said_by_the_kit(case, failure, quotes)
    found = fields(case)
    fix = ""
    if is_lost_connection(failure.error):
        name = "lost-connection"
        what = f"{found['who']} lost the connection to the others, and no other rank has said why it went."
        command = RESUME
    elif failure.traceback:
        name = "exception"
        what = f"{found['who']} raised {found['error']}{found['crashed_at']}."
        traceback = failure.log(case.run).traceback
        if traceback is not None and traceback.first != traceback.error:
            what += f" It began with {traceback.first.rstrip('.')}."
        fix = found["mend"]
        command = AGAIN
    else:
        name = "failed"
        what = f"{found['who']} failed: {found['error']}{_last_words(case.run, failure)}."
        fix = "Its last words:"
        if not failure.log(case.run).path.exists():
            fix = f"Its log is not here, but where it ran ({found['on_node']}); there:"
        command = LOG
    return _where_it_started(case.run, Cause(name, what, quotes, fix, command.format_map(found), failure))


def _silent(case: Case) -> Cause | None:
    """A job that ended before a rank failed, or may not have ended."""
    state = case.state
    if state.alive == "yes" or not state.job_id or state.state == "UNKNOWN":
        return None
    what = f"The job ended ({evidence.words_of_state(state)}) before a rank of it said anything"
    batch = "\n".join(source.text for source in case.sources if source.place == "batch")
    told = WORDS["told"].search(evidence.until_ended(batch))
    what += f": {told[0].strip()}" if told is not None else "."
    command = f"python -m jobs.logs {shlex.quote(str(case.run.path))}"
    return Cause("no-words", what, _once(_around(case)), "", command, None)


def _said_by_the_kit(case: Case, failure: Failure, quotes: tuple[Quote, ...]) -> Cause:
    """An error of our own, which has said what, why and how to fix it."""
    what = failure.traceback[0]
    why = failure.traceback[1].removeprefix("  why: ")
    fix = "\n".join(failure.traceback).partition("\n  fix: ")[2].partition("\n")[0]
    changes = settings_of(what, fix)
    if "submit again" in fix.lower():  # code is to be mended: no value of a setting would help
        changes = [change for change in changes if not change.endswith(f"={TO_FILL_IN}")]
        command = AGAIN
    else:
        command = AGAIN if changes else RESUME
    with_changes = " ".join([command.format_map(fields(case)), *map(shlex.quote, changes)])
    return _where_it_started(case.run, Cause("said-by-the-kit", what, quotes, fix, with_changes, failure, why))


def _last_words(run: RunDir, failure: Failure) -> str:
    """The last line with an error, or the last one, of a rank of which only an exit code is known."""
    tail = [text for _, text in failure.log(run).tail if text.strip()]
    if not tail or not failure.error.lower().startswith(("exited", "exit code")):
        return ""
    errors = list(filter(WORDS["error"].search, tail))
    return f"; its last words: {(errors or tail)[-1].strip()}".rstrip(".")


def _once(quotes: list[Quote]) -> tuple[Quote, ...]:
    """Each line once, from the place that says where it stands."""
    best: dict[str, Quote] = {}
    for quote in quotes:
        known = best.get(quote.text)
        if known is None or (":" in quote.where and ":" not in known.where):
            best[quote.text] = quote
    return tuple(best.values())[:_SHOWN]


def _around(case: Case) -> list[Quote]:
    """Words of srun, the job and the failing rank, beside the line that decided."""
    failure = case.failure
    found = []
    for source in case.sources:
        if source.place == "batch":
            lines = list(WORDS["told"].finditer(evidence.until_ended(source.text)))
            found += [source.quote(match.start()) for match in lines[:2]]
        elif source.place == "rank" and source.where and not source.aside and failure and failure.error in source.text:
            found.append(source.quote(source.text.rindex(failure.error)))
    for source in case.sources:
        if source.place == "job":
            found.append(Quote(source.where, source.text.strip()))
    if failure is not None and not failure.traceback:  # its last words, whatever they are worth
        for number, text in reversed(failure.log(case.run).tail):
            if text.strip():
                found.append(LogSource("rank", failure.log_name, text, number).quote(0))
                break
    return found
