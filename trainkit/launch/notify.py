"""Tells people how a run has ended, where they have left an address: by apprise, to mail, Slack, ntfy, a webhook ...

An address is a secret: who knows it may write there, or holds a password. So there is no setting for it, and no record
has one. Addresses are in the variable ``TRAINKIT_NOTIFY``, with blanks between them, or in the file ``notify`` of the
user's state folder, one a line. Who is told of what is ``launch.notify``.
"""

import importlib.util
import logging
import socket
import sys
import threading
from collections.abc import Mapping

from trainkit import fileio, terminal
from trainkit.errors import TrainkitError, UserError
from trainkit.run.events import history_of, read_events
from trainkit.run.folder import RunDir, state_file
from trainkit.schedulers.base import JobState

VARIABLE = "TRAINKIT_NOTIFY"
PATIENCE_SECONDS = 10.0
"""With all receivers together: a job must not hold its nodes for them."""
_LONGEST = 1 << 16
INSTALL = 'pip install "trainkit-vision[notify]"'


def addresses(env: Mapping[str, str]) -> list[str]:
    """Where this user wants to be told. In the file, lines with a # in front count for nothing.

    Raises UserError for a file that others can read, or nobody.
    """
    file = state_file("notify")
    if env.get(VARIABLE):
        return env[VARIABLE].split()
    try:
        text = fileio.read_text(file, _LONGEST, follow=True)
        fileio.require_private(file, "Who knows an address can write there.")
    except FileNotFoundError:
        return []
    except OSError as error:
        fix = "Write one address a line, or remove it."
        raise UserError(f"Cannot read {file}.", why=f"{error}.", fix=fix) from None
    return [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def objection(env: Mapping[str, str], *, reaches_internet: bool) -> str:
    """Why nobody will be told of a run that is about to be submitted; empty where all is well, or nobody asked."""
    try:
        if not addresses(env):
            return ""
    except UserError as error:
        return f"Nobody will be told how it ends: {error.what} {error.fix}"
    if importlib.util.find_spec("apprise") is None:
        return f"Nobody will be told how it ends, for apprise is missing: {INSTALL}"
    offline = "compute nodes do not reach the internet (launch.internet=false), from where the message is sent"
    return "" if reaches_internet else f"Perhaps nobody will be told how it ends: {offline}."


def tell(run: RunDir, env: Mapping[str, str]) -> None:
    """Tell how the newest attempt of a run has ended, if it has, for good, and somebody wants to know.

    It takes `PATIENCE_SECONDS` at most, and raises nothing. What went wrong is said on stderr, without an address.
    """
    failed: list[str] = []
    worker = threading.Thread(target=_tell, args=(run, env, failed), name="notify", daemon=True)
    worker.start()
    worker.join(PATIENCE_SECONDS)
    if worker.is_alive():
        failed = [f"it took longer than {PATIENCE_SECONDS:.0f} s"]
    for why in failed:
        print(f"Not told how {run.name} has ended: {why}.", file=sys.stderr, flush=True)


def _tell(run: RunDir, env: Mapping[str, str], failed: list[str]) -> None:
    try:
        if (found := addresses(env)) and (news := news_of(run)):
            _send(found, *news, failed)
    except TrainkitError as error:
        failed.append(f"{error.what} {error.fix}".rstrip("."))
    except Exception as error:  # its words might repeat an address
        failed.append(type(error).__name__)


def news_of(run: RunDir) -> tuple[str, str] | None:
    """A title and a text on how a run has ended; None where it goes on, was cancelled, or nobody wants to know."""
    from trainkit.config import yaml  # a submission needs none of these
    from trainkit.diagnosis.causes import cause_of
    from trainkit.report.facts import summary_lines
    from trainkit.run import secrets

    life, attempts = history_of(run), run.attempts()
    last = next(iter(read_events(run, "ended")[-1:]), {})
    newest = attempts[-1] if attempts else None
    state, cancelled = last.get("state"), life.submission is not None and life.submission.cancelled
    if last.get("attempt") != newest or newest in life.requeued or cancelled or state == "CANCELLED":
        return None
    wanted = yaml.read(run.config, follow=False)[0].get("launch", {}).get("notify", ["finished", "failed"])
    if ("finished" if state == "COMPLETED" else "failed") not in wanted:
        return None
    place = f"{socket.gethostname()}:{run.path}"
    if state == "COMPLETED":
        return f"{run.name} has finished", f"{summary_lines(run)[0]}\n{place}"
    lines = []
    if state == "PREEMPTED":
        lines = ["It was told to stop, has saved, and does not go on by itself."]
    elif isinstance(why := last.get("why"), str):
        lines = [f"It is not started again: {terminal.one_line(why)}."]
    executor = life.submission.executor if life.submission is not None else ""
    if cause := cause_of(run, JobState(str(state), executor=executor), newest) if state != "PREEMPTED" else None:
        lines += [cause.what, *([f"why: {cause.why}"] if cause.why else []), f"fix: {cause.advice}"]
    text = "\n".join([*lines, terminal.command("why", run.path), place])
    return f"{run.name} has ended: {state}", secrets.redacted(text, secrets.find(text, python=False))


def _send(found: list[str], title: str, body: str, failed: list[str]) -> None:
    """To every address at once: one that hangs keeps no other waiting."""
    try:
        import apprise
    except ImportError:
        failed.append(f"apprise is missing: {INSTALL}")
        return
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)  # it would say where it could not reach

    def send(number: int, kind: str, one: apprise.Apprise) -> None:
        try:
            if not one.notify(body=body, title=title):
                failed.append(f"address {number} ({kind}) did not take it")
        except Exception as error:  # a plugin's own
            failed.append(f"address {number} ({kind}): {type(error).__name__}")

    asset, senders = apprise.AppriseAsset(async_mode=False), []
    for number, address in enumerate(found, 1):
        kind, one = terminal.one_line(address.partition(":")[0], 20), apprise.Apprise(asset=asset)
        if one.add(address):
            senders.append(threading.Thread(target=send, args=(number, kind, one), daemon=True))
            senders[-1].start()
        else:
            failed.append(f"apprise does not know address {number} ({kind})")
    for sender in senders:
        sender.join()
