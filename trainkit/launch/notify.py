"""Messages to people on how a run has ended, by apprise: to mail, Slack, ntfy, a webhook ...

An address is a secret: who knows it may write there, or holds a password. So there is no setting for it, and no record
has one. Addresses are in the variable ``TRAINKIT_NOTIFY``, with blanks between them, or in the file ``notify`` of the
user's state folder, one a line. ``launch.notify`` selects the ends that are told of.
"""

import importlib.util
import logging
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from trainkit.cluster.scheduler import JobState
from trainkit.common import fileio, terminal
from trainkit.common.errors import TrainkitError, UserError
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of
from trainkit.run.user_lists import state_file

VARIABLE = "TRAINKIT_NOTIFY"
PATIENCE_SECONDS = 10.0
"""With all receivers together: a job must not hold its nodes for them."""
_LONGEST = 1 << 16
INSTALL = 'pip install "trainkit-vision[notify]"'


def addresses(env: Mapping[str, str]) -> list[str]:
    """List the addresses of this user. In the file, lines with a # in front count for nothing.

    Raises UserError for a file that others can read, or nobody.
    """
    file = state_file("notify")
    if env.get(VARIABLE):
        return env[VARIABLE].split()
    try:
        text = fileio.read_text(file, _LONGEST, follow=True)
        fileio.require_private(file, "Anybody who knows an address can write to it.")
    except FileNotFoundError:
        return []
    except OSError as error:
        fix = "Write one address per line, or remove the file."
        raise UserError(f"Cannot read {file}.", why=f"{error}.", fix=fix) from None
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def objection(env: Mapping[str, str], *, reaches_internet: bool) -> str:
    """Why nobody will be told of a run that is about to be submitted; empty where all is well, or nobody asked."""
    try:
        if not addresses(env):
            return ""
    except UserError as error:
        return f"No notification will be sent: {error.what} {error.fix}"
    if importlib.util.find_spec("apprise") is None:
        return f"No notification will be sent because apprise is missing: {INSTALL}"
    if reaches_internet:
        return ""
    why = "the message is sent from a compute node, and those have no internet (launch.internet=false)"
    return f"Notifications may fail: {why}."


def tell(run: RunDir, env: Mapping[str, str]) -> None:
    """Tell how the newest attempt of a run has ended, if it has, for good, and somebody wants to know.

    Receivers get `PATIENCE_SECONDS`. It raises nothing, and warns of what went wrong, without an address.
    """
    failed = []
    try:
        found = addresses(env)
        news = news_of(run) if found else None
        if news is not None:
            failed = _send(found, *news)
    except TrainkitError as error:
        failed = [f"{error.what} {error.fix}".rstrip(".")]
    except Exception as error:  # its words might repeat an address
        failed = [type(error).__name__]
    for why in failed:
        terminal.warn(f"No notification was sent about the end of {run.name}: {why}.")


def news_of(run: RunDir) -> tuple[str, str] | None:
    """A title and a text on how a run has ended; None where it goes on, was cancelled, or nobody wants to know."""
    from trainkit.config import yaml  # a submission needs none of these
    from trainkit.diagnosis.causes import cause_of
    from trainkit.report.end_lines import summary_lines
    from trainkit.run import secrets

    history = history_of(run)
    newest = max(run.attempts(), default=None)
    last: Mapping[str, object] = {}
    for event in read_events(run, "ended"):
        last = event
    state = str(last.get("state"))
    if last.get("attempt") != newest or newest in history.requeued or state == "CANCELLED":
        return None
    if history.submission is not None and history.submission.cancelled:
        return None
    wanted = yaml.read(run.config, follow=False)[0].get("launch", {}).get("notify", ["finished", "failed"])
    if ("finished" if state == "COMPLETED" else "failed") not in wanted:
        return None
    place = f"{socket.gethostname()}:{run.path}"
    if state == "COMPLETED":
        return f"{run.name} has finished", f"{summary_lines(run)[-1]}\n{place}"
    lines = []
    why = last.get("why")
    if state == "PREEMPTED":
        lines.append("It was told to stop, has saved, and does not continue by itself.")
    elif isinstance(why, str):
        lines.append(f"It is not started again: {terminal.one_line(why)}.")
    executor = history.submission.executor if history.submission is not None else ""
    cause = cause_of(run, JobState(state, executor=executor), newest)
    if cause is not None and state != "PREEMPTED":
        lines.append(cause.what)
        if cause.why:
            lines.append(f"why: {cause.why}")
        lines.append(f"fix: {cause.advice}")
    text = "\n".join([*lines, terminal.command("why", run.path), place])
    return f"{run.name} has ended: {state}", secrets.redacted(text, secrets.find(text, python=False))


def _send(found: Sequence[str], title: str, body: str) -> list[str]:
    """Send to every address at once: one that hangs keeps no other waiting. Returns what went wrong."""
    try:
        import apprise
    except ImportError:
        return [f"apprise is missing: {INSTALL}"]
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)  # it would say where it could not reach
    failed = []

    def send(name: str, one: apprise.Apprise) -> None:
        try:
            if not one.notify(body=body, title=title):
                failed.append(f"address {name} did not accept it")
        except Exception as error:  # a plugin's own
            failed.append(f"address {name}: {type(error).__name__}")

    asset = apprise.AppriseAsset(async_mode=False)
    senders = []
    for number, address in enumerate(found, 1):
        name = f"{number} ({terminal.one_line(address.partition(':')[0], 20)})"
        one = apprise.Apprise(asset=asset)
        if one.add(address):
            senders.append(threading.Thread(target=send, args=(name, one), daemon=True))
            senders[-1].start()
        else:
            failed.append(f"apprise does not know address {name}")
    deadline = time.monotonic() + PATIENCE_SECONDS
    for sender in senders:
        sender.join(max(deadline - time.monotonic(), 0.0))
    if any(sender.is_alive() for sender in senders):
        return [f"it took longer than {PATIENCE_SECONDS:.0f} s"]
    return failed
