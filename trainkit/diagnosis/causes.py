"""Why a run failed, or does not start: a row of ``causes.yaml``, the lines that show it, and a command to mend it."""

import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import yaml

from trainkit import fileio, terminal
from trainkit.diagnosis import evidence
from trainkit.diagnosis.evidence import CACHES, WORDS, Failure, Quote, Source, rank_log
from trainkit.errors import UserError
from trainkit.ranks import expand
from trainkit.run.events import history_of
from trainkit.run.folder import BENCH, RunDir
from trainkit.schedulers.base import JobState, built_in

RESUME = "python -m jobs.resume {run}"
AGAIN = "python -m jobs.submit {run}"
LOG = "python -m jobs.logs {run} --attempt {attempt} --rank {rank} --err"
_COMMANDS = {"RESUME": RESUME, "AGAIN": AGAIN, "LOG": LOG, "WITHOUT": RESUME + " --exclude {host}"}
"""Commands that the rows abbreviate."""
_RECORDED = re.compile(r"^  recorded:\n(?:(?:   .*)?\n)*", re.MULTILINE)
"""The texts that prove a row: half of the file, and only the tests read them."""
EVERY_NODE = (
    "Every node of the job says so, so it is none of them: look at the environment, the mask and the driver. Then:"
)
EVERYWHERE = "On each of its machines, with its own --node-rank and one secret for all:"
_IN_OWN_WORDS = {"exception", "failed", "said-by-the-kit", "no-words"}
"""Answers that repeat what was said, where no row is known."""
_SHOWN = 6
"""Lines of evidence."""
_QUOTED = frozenset({"run", "logs", "there", "more_memory"})
"""Fields that are quoted for a shell already."""
TO_FILL_IN = "..."
"""Stands for a value that only the user knows; every setting that can be meant refuses it."""


@dataclass(frozen=True)
class Row:
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
        found = [match for pattern in self.says if (match := re.search(pattern, text, re.MULTILINE))]
        return max(found, key=_named_groups, default=None)

    def match(self, source: Source) -> re.Match[str] | None:
        """Where a source shows this cause."""
        if source.place == "batch" and source.raised and "rank" in self.seen and "job" not in self.seen:
            return None  # a script grumbles of much that ends no rank; the one that ended has said why
        if source.of_code and not self.of_code:
            return None
        places = {"end", "rank"} if source.place == "end" else {source.place}
        return self.find(source.text) if places & self.seen else None


def _named_groups(match: re.Match[str]) -> int:
    return sum(map(bool, match.groupdict().values()))


@cache
def rows() -> tuple[Row, ...]:
    """All rows, in the order in which they are tried. Patterns are compiled when they are first tried."""
    text = _RECORDED.sub("", Path(__file__).with_name("causes.yaml").read_text("utf-8"))
    return tuple(_row(item) for item in yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def _row(item: dict[str, Any]) -> Row:
    says = item.pop("says")
    return Row(
        seen=frozenset(item.pop("seen").split()),
        says=(says,) if isinstance(says, str) else tuple(says),
        command=re.sub(r"\b[A-Z]{3,}\b", lambda word: _COMMANDS.get(word[0], word[0]), item.pop("command")),
        **item,
    )


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
    row: Row | None = None
    """None where no row explains it."""

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

        The words and line of an error that no row knows count; the numbers in the sentence of a known cause do not.
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
    """The one cause of what has become of an attempt (the newest if None); None where nothing speaks of one.

    Facts of the machine come first, then what ended or holds the job, then the rank that failed first.

    Args:
        state: of the run's newest job, as `trainkit.schedulers.base` has it.
    """
    if attempt is None and state.state == "COMPLETED":
        return None
    latest = (run.attempts() or [0])[-1]
    number = latest if attempt is None else attempt
    waits = attempt is None and state.alive == "yes" and state.state != "COMPLETING"
    newest = attempt is None or (state.alive != "yes" and number == latest)
    failure = None if waits else evidence.failure_of(run, number)
    sources = evidence.sources_of(run, state, number, failure, newest=newest, waits=waits)
    tried = rows()
    if attempt is None and state.state == "RUNNING":  # it may wait for a rank that never started
        tried, sources = tuple(row for row in tried if row.name == "launch-failure"), evidence.of_the_batch(run, number)
    facts = "" if waits else evidence.facts_of(run, number)
    if fit := _first_that_fits(tried, sources, facts):
        return _cause(*fit, run, state, number, failure, sources)
    return _otherwise(run, state, number, failure, sources)


def sentence_for(error: str) -> str:
    """What a cause says that the words of a rank's error show, where no run has them; empty if none is known."""
    known = Fields({"who": "A rank", "on_node": "the node", "error": error.strip().rpartition("\n")[2].rstrip(".")})
    for vague in (False, True):
        for row in rows():
            if "rank" not in row.seen or row.vague != vague or row.of_code:
                continue
            if (match := row.find(error)) and not (row.unless and re.search(row.unless, error, re.MULTILINE)):
                known.update({name: value.strip().rstrip(".") for name, value in match.groupdict().items() if value})
                return row.what.format_map(known)
    return ""


def _first_that_fits(
    tried: Sequence[Row], sources: list[Source], facts: str
) -> tuple[Row, re.Match[str], Source] | None:
    """Try rows that name a cause before those that name a consequence, and the last words before what led to them."""
    texts = [facts, *(source.text for source in sources)]
    for vague, aside in product((False, True), (False, True)):
        for row in tried:
            fits = [
                (row, match, source)
                for source in sources
                if row.vague == vague and source.aside == aside and (match := row.match(source))
            ]
            if fits and not (row.unless and any(re.search(row.unless, text, re.MULTILINE) for text in texts)):
                return max(fits, key=lambda fit: _named_groups(fit[1]))
    return None


def _cause(
    row: Row, match: re.Match[str], source: Source, run: RunDir, state: JobState, attempt: int,
    failure: Failure | None, sources: list[Source],
) -> Cause:  # fmt: skip
    found = fields(run, state, attempt, failure)
    if "{lagging}" in row.command:
        found.update(_behind(run, attempt))
    groups = {name: value.strip().rstrip(".") for name, value in match.groupdict().items() if value}
    found.update(groups)
    if failure is not None and failure.error.endswith(f"(on {failure.host})") and source.place in ("rank", "batch"):
        found["error"] = source.quote(match.start()).text.rstrip(".")  # srun only knows that it exited
    fix, command = row.fix, row.command
    if "{host}" in command and _on_every_node(row, run, attempt, failure, found["hosts"]):
        found["host"], fix = "", EVERY_NODE
    if "task" in groups:
        found["unseeing"] = _host_of_task(run, found["hosts"], int(groups["task"]))
    if "failed" in groups:
        found["failed_hosts"] = _hosts_of(groups["failed"])
    quotes = [*([source.quote(match.start())] if source.where else []), *_around(run, failure, sources)]
    for_shell = {key: text if key in _QUOTED or not text else shlex.quote(text) for key, text in found.items()}
    command = re.sub(r" --exclude(?= *$)", "", command.format_map(Fields(for_shell))).rstrip()  # no node is known
    fix = fix.format_map(found).strip()
    fix = fix[:1].upper() + fix[1:]
    asks = WORDS["asks-slurm"].match(command)
    if asks and asks[1] not in built_in(state.executor).tools:  # SLURM knows nothing of a job of this machine
        command, fix = terminal.command("status", run.path), ""
    asked_for = _hosts_of(run.directive("nodelist"))
    excluded = _hosts_of(found["failed_hosts"] or found["host"])
    if {*filter(None, asked_for.split(","))} & {*excluded.split(",")} and " --exclude " in command:
        command = re.sub(r" --exclude \S+", "", command)  # sbatch refuses a node that is asked for and excluded
        fix = "It asks for that very node (--nodelist): name another, or, when it is well again:"
    what = row.what.format_map(found)
    return _where_it_started(run, Cause(row.name, what, _once(quotes), fix, command, failure, row=row))


def _on_every_node(row: Row, run: RunDir, attempt: int, failure: Failure | None, hosts: str) -> bool:
    """Whether a rank of each node of the job, of several, ended with the same: then no single node is to blame."""
    if failure is None or "," not in hosts:
        return False
    one_of_each = {_host_of_task(run, hosts, failure.rank): True}
    for rank in evidence.ranks_of(run, attempt):
        host = _host_of_task(run, hosts, rank)
        if host not in one_of_each:
            one_of_each[host] = row.find(rank_log(run, attempt, rank).error) is not None
    return all(one_of_each.get(node, False) for node in hosts.split(","))


def _where_it_started(run: RunDir, cause: Cause) -> Cause:
    """The cause with the command that mends it where the run was started."""
    if "-m jobs.resume " in cause.command and BENCH.at(run.path).is_file():
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
        told = WORDS["told"].search(evidence.until_ended(batch))
        said = f": {told[0].strip()}" if told is not None else "."
        what = f"The job ended ({evidence.words_of_state(state)}) before a rank of it said anything{said}"
        return Cause("no-words", what, quotes, "", f"python -m jobs.logs {found['run']}", None)

    def answer(name: str, what: str, fix: str, command: str) -> Cause:
        return _where_it_started(run, Cause(name, what, quotes, fix, command.format_map(found), failure))

    log, error = failure.log(run), failure.error.rstrip(".")
    if len(failure.traceback) > 1 and failure.traceback[1].startswith("  why: "):
        fix = next((line[7:] for line in failure.traceback if line.startswith("  fix: ")), "")
        what, changes = failure.traceback[0], settings_of(failure.traceback[0], fix)
        command = AGAIN if changes or "submit again" in fix else RESUME
        with_changes = " ".join([command.format_map(found), *map(shlex.quote, changes)])
        why = failure.traceback[1][7:]
        return _where_it_started(run, Cause("said-by-the-kit", what, quotes, fix, with_changes, failure, why))
    if evidence.is_lost_connection(failure.error):
        what = f"{found['who']} lost the connection to the others, and no other rank has said why it went."
        return answer("lost-connection", what, "", RESUME)
    if failure.traceback:
        traceback, after = log.traceback, ""
        if traceback is not None and traceback.first != traceback.error:
            after = f" It began with {traceback.first.rstrip('.')}."
        return answer("exception", f"{found['who']} raised {error}{found['crashed_at']}.{after}", found["mend"], AGAIN)
    tail = [text for _, text in log.tail if text.strip()]
    words = [text for text in tail if WORDS["error"].search(text)][-1:] or tail[-1:]
    if words and failure.error.lower().startswith(("exited", "exit code")):
        error += f"; its last words: {words[0].strip()}".rstrip(".")
    elsewhere = f"Its log is not here, but where it ran ({found['on_node']}); there:"
    fix = "Its last words:" if log.path.exists() else elsewhere
    return answer("failed", f"{found['who']} failed: {error}.", fix, LOG)


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
            lines = list(WORDS["told"].finditer(evidence.until_ended(source.text)))
            found += [source.quote(match.start()) for match in lines[:2]]
        elif source.place == "rank" and source.where and failure is not None and failure.error in source.text:
            found += [] if source.aside else [source.quote(source.text.rindex(failure.error))]
    found += [Quote(source.where, source.text.strip()) for source in sources if source.place == "job"]
    if failure is not None and not failure.traceback:  # its last words, whatever they are worth
        for number, text in [line for line in failure.log(run).tail if line[1].strip()][-1:]:
            where = f"logs/{failure.attempt}/rank-{failure.rank}.err" + (f":{number}" if number else "")
            found.append(Quote(where, text.strip()))
    return found


class Fields(dict[str, str]):
    """Fields of a sentence; one that is not known leaves it readable."""

    def __missing__(self, key: str) -> str:
        return "?"


def fields(run: RunDir, state: JobState, attempt: int, failure: Failure | None) -> Fields:
    """What the sentences of the rows may name: the run, its job, the rank that failed and its node."""
    from trainkit.config.checks import smaller  # a tenth of a second, for those that have failed alone
    from trainkit.config.schema import SECTIONS

    life = history_of(run)
    plan, config = fileio.read_object(run.plan), _settings(run)
    hosts = _hosts_of(state.nodes) or ",".join(map(str, life.started.get("hosts") or ()))
    host = ""
    if failure is not None:
        told = [item.host for item in life.failures if (item.attempt, item.rank) == (attempt, failure.rank)]
        host = next(filter(None, [failure.host, *told]), "") or _host_of_task(run, hosts, failure.rank)
    host = host or hosts.partition(",")[0]
    rank = f"Rank {failure.rank}" if failure is not None else "A rank"
    seconds = plan.get("time_limit_seconds")
    ranks = max(int(life.started.get("world_size") or plan.get("world_size") or 1), 1)
    share = max(int(config.get("global_batch_size") or 64) // ranks, 1)
    micro = int(config.get("micro_batch_size") or life.started.get("micro_batch_size") or share)
    lr = config.get("lr") or 11.0  # the default in place of one that no optimizer trains with
    memory = _more_memory(run.directive("mem")) if built_in(state.executor).batch else ""
    hours, minutes = divmod(max(2 * seconds // 60, 1), 60) if fileio.is_whole(seconds) else (2, 0)
    places, own = evidence.places_of(failure.traceback if failure is not None else ())
    at, own_at = [f"{Path(found[-1][0]).name}:{found[-1][1]}" if found else "" for found in (own or places, own)]
    mend = f"Mend {own_at}:" if own[-1:] == places[-1:] else f"Look at {own_at}, which called this:"
    place, moved_by = _place_of(failure)
    return Fields(
        {
            "run": shlex.quote(str(run.path)),
            "logs": shlex.quote(str(run.logs)),
            "job": state.job_id,
            "state": state.state,
            "reason": state.reason,
            "nodes": state.nodes or "The node",
            "hosts": hosts,
            "unseeing": hosts.partition(",")[0] or "the node",
            "host": host,
            "on_node": host or "the node",
            "failed": f"One of {state.nodes}" if "," in hosts else state.nodes or "A node",
            "failed_hosts": "" if "," in hosts else hosts,
            "who": f"{rank} on {host}" if host else rank,
            "rank": str(failure.rank) if failure is not None else "0",
            "error": failure.error.rstrip(".") if failure is not None else "",
            "attempt": str(attempt),
            "at": at,
            "mend": mend if own else "",
            "place": place or str(run.path),
            "folder": _folder(place) if place else str(run.path.parent),
            "moves": f" ({moved_by}=FOLDER puts it elsewhere)" if moved_by else "",
            "full": fileio.full(Path(_folder(place or str(run.path)))) or "The disk is full, of bytes or of files",
            "crashed_at": f", at {at}" if at else "",
            "there": built_in(state.executor).at_node(host),
            "which": "gloo" if failure is not None and "loo " in failure.error else "NCCL",
            "more_memory": memory,
            "all_of_it": " (0: all that it has)" if memory == " --mem 0" else "",
            "unless_memory": _unless_memory(state),
            "twice_the_time": f"{hours}:{minutes:02d}:00",
            "half_the_batch": str(smaller(micro, share)),
            "half_the_lr": f"{lr / 2 if lr <= 10 else SECTIONS['optim'].model_fields['lr'].default:g}",
        }
    )


def _behind(run: RunDir, attempt: int) -> dict[str, str]:
    """The fields that name the ranks for which others waited; every rank's log is read for them."""
    ranks = evidence.lagging_ranks(run, attempt)
    named = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return {
        "behind": f"rank{'s' * (len(ranks) > 1)} {named}" if ranks else "another rank",
        "lagging": str(ranks[0]) if ranks else "0",
    }


def _more_memory(asked_for: str) -> str:
    """Twice what each node was asked for; all that it has where that is not known; nothing if that was not enough."""
    size = re.fullmatch(r"(\d{1,9})([KMGT]?)B?", asked_for)
    if size is None:
        return " --mem 0"
    return f" --mem {2 * int(size[1])}{size[2]}" if int(size[1]) else ""


def _unless_memory(state: JobState) -> str:
    """Where to see whether memory ran out, and what to do then."""
    scheduler = built_in(state.executor)
    more = "more --mem" if scheduler.batch else "a smaller batch or fewer data.workers in a new run"
    return f"If `{scheduler.shows_memory(state.job_id)}` shows that memory ran out, with {more}; else:"


def _settings(run: RunDir) -> dict[str, float]:
    """The numbers of the configuration that a fix may halve."""
    text = ""
    with suppress(OSError):
        text = fileio.read_text(run.config)
    return {key: float(value) for key, value in reversed(WORDS["numbers"].findall(text))}


def _host_of_task(run: RunDir, hosts: str, task: int) -> str:
    """The node of a task that has not named its own."""
    each, names = fileio.read_object(run.plan).get("ntasks_per_node"), hosts.split(",")
    index = task // each if fileio.is_whole(each) and each else 0
    return names[index] if index < len(names) else names[0]


def _hosts_of(nodelist: str) -> str:
    """Names with commas between them; many nodes as SLURM writes them."""
    try:
        names = expand(nodelist) if nodelist else []
    except UserError:
        return ""
    return ",".join(names) if len(names) <= 8 else nodelist


def _place_of(failure: Failure | None) -> tuple[str, str]:
    """The file or folder that an error is about, and the variable that moves it; each empty if not known.

    The error names it, or it follows from what was about to be written: a cache of the home folder, or the node's /tmp.
    """
    if failure is None:
        return "", ""
    named = WORDS["path"].findall(failure.error)
    seen = named[-1] if named else "\n".join(failure.traceback)
    for part, folder, variable in CACHES:
        if part in seen:
            return (named[-1] if named else os.path.expanduser(folder)), variable
    if named and named[-1].startswith("/tmp/"):
        return named[-1], "TMPDIR"
    return (named[-1], "") if named else ("", "")


def _folder(place: str) -> str:
    """The folder of a file."""
    return place if os.path.isdir(place) or not os.path.splitext(place)[1] else os.path.dirname(place)


def on_every_machine(run: RunDir, command: str) -> str:
    """The command to give on every machine of a run that `jobs.launch` started on several; else the same command.

    Args:
        command: may resume the run by ``jobs.resume`` or start it anew by ``jobs.submit``.
    """
    submission = history_of(run).submission
    nodes = fileio.read_object(run.plan).get("nodes")
    typed = fileio.read_object(run.manifest).get("command")
    one = submission is None or submission.executor != "launch" or not fileio.is_whole(nodes) or nodes < 2
    # `NCCL_DEBUG=INFO python -m jobs.resume RUN`: variables, or `env -u NAME`, go before the command of each machine.
    before, _, after = command.partition("python -m jobs.")
    verb = after.partition(" ")[0]
    if one or not isinstance(typed, list) or "jobs.launch" not in typed or verb not in ("resume", "submit"):
        return command
    words, options = list[str](), list[str]()
    rest = [str(word) for word in typed[typed.index("jobs.launch") + 1 :]]
    while rest:
        word = rest.pop(0)
        both = [word]
        if not word.startswith("-"):
            words.append(word)
        elif "=" not in word and rest and word != "--allow-code":
            both.append(rest.pop(0))
        if word.startswith("-") and word.partition("=")[0] not in ("--run-dir", "--master-port"):
            options += both  # a further start gets those two anew
    if verb == "resume":
        return before + shlex.join(["python", "-m", "jobs.launch", str(run.path), *options])
    settings = [word for word in shlex.split(after)[2:] if "=" in word]
    return before + shlex.join(["python", "-m", "jobs.launch", *words, *options, *settings])


def settings_of(what: str, fix: str) -> list[str]:
    """``section.key=value`` of the change that ``fix`` asks for, the first one where it offers several.

    A setting that it names without a value gets its default where it is to be left out, else ``...``; so does the one
    that ``what`` complains of. Empty where the words name no setting: the machine or the data is to be mended then.
    """
    from trainkit.config.schema import SECTIONS

    key = rf"(?<![\w.])(?P<section>{'|'.join(SECTIONS)})\.(?P<key>(?!py\b)[a-z_][a-z0-9_]*)"
    advice, value = WORDS["example"].split(fix)[0], r"(?P<value>\[(?:\"[^\"]*\"|[^\]\"])*\]|[^\s,;`]+)"
    given = [
        match for match in re.finditer(f"{key}={value}", advice) if not re.fullmatch(r"[A-Z_]+\.?", match["value"])
    ]
    if given:
        chosen = given[:1]
        for before, after in pairwise(given):
            if advice[before.end() : after.start()].strip() not in ("", "and"):
                break  # from here on it is another way
            chosen.append(after)
        return [f"{match['section']}.{match['key']}={match['value'].rstrip('.')}" for match in chosen]
    match = re.search(f"[Ll]eave (?:out )?{key}", advice)
    if match is not None and match["key"] in SECTIONS[match["section"]].model_fields:
        default = str(SECTIONS[match["section"]].model_fields[match["key"]].default)
        text = {"None": "null", "True": "true", "False": "false"}.get(default, default)
        return [f"{match['section']}.{match['key']}={text}"]
    named = re.compile(rf"{key}\b(?!\.py\b)")
    match = named.search(fix) or named.search(what)
    return [f"{match['section']}.{match['key']}={TO_FILL_IN}"] if match else []
