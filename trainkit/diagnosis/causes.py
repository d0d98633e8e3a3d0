"""Why a run failed, or does not start: one cause of the tables, the lines that show it, and one command to mend it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from trainkit import terminal
from trainkit.cluster.slurm_jobs import JobState
from trainkit.diagnosis.case import AGAIN, LOG, RESUME, Case, rows
from trainkit.diagnosis.evidence import (
    STEPD,
    Failure,
    failure_of,
    is_lost_connection,
    until_ended,
)
from trainkit.diagnosis.fields import asked_for, fields, for_a_shell, host_of_task, hosts_of
from trainkit.diagnosis.launched import EVERYWHERE, on_every_machine
from trainkit.diagnosis.remedy import settings_of
from trainkit.diagnosis.stderr import last_error, tail_of, traceback_of
from trainkit.diagnosis.texts import (
    Quote,
    Source,
    facts_of,
    of_logs_elsewhere,
    of_the_batch,
    of_the_code,
    of_the_folder,
    of_the_job,
    of_the_rank,
    words_of_state,
)
from trainkit.records.rundir import RunDir

_TOLD = re.compile(rf"^(srun: error|{STEPD}|srun: fatal|bash:|.*No such file|.*not found).*", re.MULTILINE)
"""Lines of a batch script's log that are worth showing."""
_ERROR = re.compile(r"^\S*(Error|Exception|ERROR|error)\b.*: .+", re.MULTILINE)
"""Lines of a rank that left no traceback which may say why."""
_ASKS_SLURM = re.compile(r"(squeue|sacct|sinfo|scontrol|sshare|sstat) ")

EVERY_NODE = (
    "Every node of the job says so, so it is none of them: look at the environment, the mask and the driver. Then:"
)
_IN_OWN_WORDS = {"exception", "failed", "said-by-the-kit", "no-words"}
"""Answers that tell what was said, where no row is known."""
_SHOWN = 6
"""Lines of evidence."""


@dataclass(frozen=True)
class Cause:
    """Why a run is where it is."""

    name: str
    what: str
    evidence: tuple[Quote, ...]
    fix: str
    """What to do before the command; empty if the command is enough."""
    command: str
    """For a shell."""
    failure: Failure | None
    """The rank that failed first, where one did."""
    why: str = ""
    """The reason in a rank's own words, where it has given one: the kit's own errors do."""

    @property
    def shown(self) -> str:
        """That reason, or the lines of evidence, one below the other."""
        if self.why:
            return terminal.one_line(self.why, 2000)
        width = max((len(quote.where) for quote in self.evidence), default=0)
        texts = [f"{quote.where:{width}}  {terminal.one_line(quote.text, 300)}" for quote in self.evidence]
        return "\n       ".join(texts)

    def gist(self, run: RunDir) -> tuple[str, str]:
        """Equal for runs that ended for the same reason, wherever that was and whichever rank met it.

        Of an error that no row knows its own words and its line count; of a known cause no number in its sentence does.
        """
        host = self.failure.host if self.failure is not None else ""
        words = re.sub(r"\b[Rr]ank \d+( on \S+)?|\b0x[0-9a-f]+", "", self.what.replace(str(run.path), ""))
        words = words.replace(host, "") if host else words
        return self.name, words if self.name in _IN_OWN_WORDS else re.sub(r"\d+", "", words)

    @property
    def advice(self) -> str:
        """Words and command in one line."""
        return f"{self.fix} `{terminal.for_reader(self.command)}`".strip()

    def __str__(self) -> str:
        """Three lines as of an error: what, why, how to fix it; the evidence may take more."""
        why = f"  why: {self.shown}\n" if self.evidence or self.why else ""
        return f"{self.what}\n{why}  fix: {self.advice}"


def cause_of(run: RunDir, state: JobState, attempt: int | None = None) -> Cause | None:
    """The one cause for what has become of an attempt (the newest if None); None where nothing speaks of one.

    Facts of the machine come first, then what ended or holds the job, then the rank that failed first.

    Args:
        state: of the run's newest job, as `trainkit.cluster.queue` has it.
    """
    if attempt is None and state.state == "COMPLETED":
        return None
    attempts = run.attempts()
    number = attempt if attempt is not None else attempts[-1] if attempts else 0
    waits = attempt is None and state.alive == "yes" and state.state != "COMPLETING"
    newest = attempt is None or (state.alive != "yes" and number == (attempts[-1] if attempts else 0))
    failure = None if waits else failure_of(run, number)
    sources = [*of_the_job(run, state, number)] if newest else []
    if not waits:
        sources += [
            *of_the_batch(run, number, failure),
            *of_logs_elsewhere(run, state, failure),
            *of_the_rank(run, failure),
        ]
        sources += of_the_code(run, number, failure) if newest else []
        sources += of_the_folder(run) if newest and (failure is None or not failure.traceback) else []
    tried = rows()
    if attempt is None and state.state == "RUNNING":  # it may wait for a rank that never started
        tried, sources = tuple(row for row in tried if row.name == "launch-failure"), of_the_batch(run, number)
    facts = "" if waits else facts_of(run, number)
    if fit := _first_that_fits(tried, sources, facts):
        return _cause(*fit, run, state, number, failure, sources)
    return _otherwise(run, state, number, failure, sources)


def _first_that_fits(
    tried: Sequence[Case], sources: list[Source], facts: str
) -> tuple[Case, re.Match[str], Source] | None:
    """Rows that name a cause go before those that name a consequence, and what was said last before what led to it."""
    texts = [facts, *(source.text for source in sources)]
    for vague, aside in product((False, True), (False, True)):
        looked_at = [source for source in sources if source.aside == aside]
        for row in tried:
            if row.vague != vague or row.contradicted(texts):
                continue
            if fits := [(row, match, source) for source in looked_at if (match := source.match(row))]:
                return max(fits, key=lambda fit: sum(map(bool, fit[1].groupdict().values())))
    return None


def _cause(
    row: Case, match: re.Match[str], source: Source, run: RunDir, state: JobState, attempt: int,
    failure: Failure | None, sources: list[Source],
) -> Cause:  # fmt: skip
    found = fields(run, state, attempt, failure)
    groups = {name: value for name, value in match.groupdict().items() if value}
    found.update({name: value.strip().rstrip(".") for name, value in groups.items()})
    if failure is not None and failure.error.endswith(f"(on {failure.host})") and source.place in ("rank", "batch"):
        found["error"] = source.quote(match.start()).text.rstrip(".")  # srun only knows that it exited
    if row.name == "missing-module":
        found["module"] = found["module"].partition(".")[0]
    if "{host}" in row.command and _on_every_node(row, run, attempt, failure, found["hosts"]):
        found["host"] = ""
        row = replace(row, fix=EVERY_NODE)
    if "task" in groups:
        found["unseeing"] = host_of_task(run, found["hosts"], int(groups["task"]))
    if "failed" in groups:
        found["failed_hosts"] = hosts_of(groups["failed"])
    # What srun said of a rank is quoted from the batch log.
    quotes = [*([source.quote(match.start())] if source.where else []), *_around(run, failure, sources)]
    command = row.command.format_map(for_a_shell(found))
    command = re.sub(r" --exclude(?= *$)", "", command).rstrip()  # no node is known
    fix = row.fix.format_map(found).strip()
    fix = fix[:1].upper() + fix[1:]
    if state.executor != "slurm" and _ASKS_SLURM.match(command):  # of a job of this machine SLURM knows nothing
        command, fix = terminal.command("status", run.path), ""
    if asked_for(run) & set(hosts_of(found["failed_hosts"] or found["host"]).split(",")) and " --exclude " in command:
        command = re.sub(r" --exclude \S+", "", command)  # sbatch refuses a node that is asked for and excluded
        fix = "It asks for that very node (--nodelist): name another, or, when it is well again:"
    return _for(run, Cause(
        row.name, row.what.format_map(found), _once(quotes), fix, command, failure
    ))  # fmt: skip


def _on_every_node(row: Case, run: RunDir, attempt: int, failure: Failure | None, hosts: str) -> bool:
    """Whether a rank of each node of the job, of several, ended with the same: then no single node is to blame."""
    nodes = set(hosts.split(","))
    if failure is None or len(nodes) < 2:
        return False
    one_of_each = {host_of_task(run, hosts, failure.rank): True}
    for path in sorted(run.attempt_logs(attempt).glob("rank-*.err")):
        rank = path.stem.removeprefix("rank-")
        host = host_of_task(run, hosts, int(rank)) if rank.isascii() and rank.isdecimal() else ""
        if host and host not in one_of_each:
            one_of_each[host] = row.find(last_error(path)) is not None
    return all(one_of_each.get(node, False) for node in nodes)


def _for(run: RunDir, cause: Cause) -> Cause:
    """The cause with the command that mends it where the run was started."""
    if "-m jobs.resume " in cause.command and (run.path / "bench.json").is_file():
        show = terminal.command("bench", "--show", run.path)
        return replace(cause, command=show, fix="A bench is not gone on with: start another one. What it has measured:")
    command = on_every_machine(run, cause.command)
    if command == cause.command:
        return cause
    return replace(cause, command=command, fix=f"{cause.fix.rstrip(':')}. {EVERYWHERE}".lstrip(". "))


def _otherwise(
    run: RunDir, state: JobState, attempt: int, failure: Failure | None, sources: list[Source]
) -> Cause | None:
    """What no row knows: our own three lines, an exception of the user's code, a lost connection, or silence."""
    found = fields(run, state, attempt, failure)
    quotes = _once(_around(run, failure, sources))
    if failure is None:
        if state.alive == "yes" or not state.job_id or state.state == "UNKNOWN":
            return None
        batch = next((source.text for source in sources if source.place == "batch"), "")
        told = _TOLD.search(until_ended(batch))
        said = f": {told[0].strip()}" if told is not None else "."
        what = f"The job ended ({words_of_state(state)}) before a rank of it said anything{said}"
        return Cause("no-words", what, quotes, "", f"python -m jobs.logs {found['run']}", None)
    if len(failure.traceback) > 1 and failure.traceback[1].startswith("  why: "):
        fix = next((line[7:] for line in failure.traceback if line.startswith("  fix: ")), "")
        what, why = failure.traceback[0], failure.traceback[1][7:]
        changes = settings_of(what, fix)
        again = AGAIN if changes or "submit again" in fix else RESUME
        command = " ".join([again.format_map(found), *(map(shlex.quote, changes) if again == AGAIN else ())])
        return _for(run, Cause("said-by-the-kit", what, quotes, fix, command, failure, why))
    if is_lost_connection(failure.error):
        what = f"{found['who']} lost the connection to the others, and no other rank has said why it went."
        return _for(run, Cause("lost-connection", what, quotes, "", RESUME.format_map(found), failure))
    if failure.traceback:
        at = f", at {found['at']}" if found["at"] else ""
        traceback = traceback_of(run.attempt_logs(failure.attempt) / f"rank-{failure.rank}.err")
        first = traceback.first if traceback is not None else failure.error
        after = f" It began with {first.rstrip('.')}." if traceback is not None and first != traceback.error else ""
        what = f"{found['who']} raised {failure.error.rstrip('.')}{at}.{after}"
        return _for(run, Cause("exception", what, quotes, found["mend"], AGAIN.format_map(found), failure))
    tail = [text for _, text in tail_of(run.attempt_logs(failure.attempt) / f"rank-{failure.rank}.err") if text.strip()]
    words = [text for text in tail if _ERROR.search(text)][-1:] or tail[-1:]
    mute = failure.error.lower().startswith(("exited", "exit code"))
    last = f"; its last words: {words[0].strip()}" if words and mute else ""
    what = f"{found['who']} failed: {failure.error.rstrip('.')}{last.rstrip('.')}."
    here = (run.attempt_logs(failure.attempt) / f"rank-{failure.rank}.err").exists()
    fix = "Its last words:" if here else f"Its log is not here, but where it ran ({found['on_node']}); there:"
    return _for(run, Cause("failed", what, quotes, fix, LOG.format_map(found), failure))


def _once(quotes: list[Quote]) -> tuple[Quote, ...]:
    """Each line once, from the place that says where it stands."""
    best: dict[str, Quote] = {}
    for quote in quotes:
        known = best.get(quote.text)
        if known is None or (":" in quote.where and ":" not in known.where):
            best[quote.text] = quote
    return tuple(best.values())[:_SHOWN]


def _around(run: RunDir, failure: Failure | None, sources: list[Source]) -> list[Quote]:
    """What srun, the job and the failing rank say, beside the line that decided."""
    found = []
    for source in sources:
        if source.place == "batch":
            found += [source.quote(match.start()) for match in list(_TOLD.finditer(until_ended(source.text)))[:2]]
        elif source.place == "rank" and source.where and failure is not None and failure.error in source.text:
            found += [] if source.aside else [source.quote(source.text.rindex(failure.error))]
    found += [Quote(source.where, source.text.strip()) for source in sources if source.place == "job"]
    if failure is not None and not failure.traceback:  # its last words, whatever they are worth
        err = f"rank-{failure.rank}.err"
        tail = [line for line in tail_of(run.attempt_logs(failure.attempt) / err) if line[1].strip()]
        numbered = f"logs/{failure.attempt}/{err}" + (f":{tail[-1][0]}" if tail and tail[-1][0] else "")
        found += [Quote(numbered, text.strip()) for _, text in tail[-1:]]
    return found
