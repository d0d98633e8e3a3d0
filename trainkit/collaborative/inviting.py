"""What the owner of a run does beside it: invite, and revoke. Works on the run's folder, and tells the swarm."""

from __future__ import annotations

import re
from collections.abc import Mapping

from trainkit import reading, terminal
from trainkit.collaborative import address, processes
from trainkit.collaborative.address import ADDRESS_FILE
from trainkit.collaborative.entry import VARIABLE
from trainkit.collaborative.home import home_of
from trainkit.collaborative.invitation import Role, date, write_token
from trainkit.collaborative.owner import KEY_FILE, Owner, own_pass, owner_of
from trainkit.errors import TrainkitError, UserError
from trainkit.records.rundir import RunDir, find_run, list_runs, runs_root

_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_LONGEST = 366 * 86400.0


def seconds_of(text: str) -> float:
    """``7d``, ``12h``, ``30m``, ``2w`` in seconds.

    Raises UserError for anything else, and for more than a year.
    """
    match = re.fullmatch(r"(\d{1,6})([mhdw])", text)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0.0 < seconds <= _LONGEST:
        raise UserError(
            f"--expires {text} is no time.",
            why="It is a number with m, h, d or w behind it, and a year at most.",
            fix="Use --expires 7d.",
        )
    return seconds


def created_run(reference: str | None, env: Mapping[str, str]) -> RunDir:
    """The run of that name or path, or the newest one here whose owner's key is here.

    Raises UserError when there is none.
    """
    return run_with(KEY_FILE, reference, env, fix="Name its folder")


def run_with(file: str, reference: str | None, env: Mapping[str, str], *, fix: str) -> RunDir:
    """The run of that name or path, or the newest one here that has such a file of a swarm's.

    Raises UserError when there is none; ``fix`` is what to give instead.
    """
    if reference is not None:
        return find_run(reference, env)
    root = runs_root(env)
    swarms = [run for run in list_runs(root) if (run.path / file).is_file()]
    if not swarms:
        raise UserError(
            f"No swarm in {root}.",
            why="None of the runs there has created one.",
            fix=f"{fix}, or create one: python -m jobs.swarm create hivemind",
        )
    return swarms[-1]


def addresses_of(run: RunDir) -> tuple[str, ...]:
    """Where the swarm of a run is, or was last, the best first.

    Raises UserError when it has not been anywhere yet.
    """
    try:
        found = reading.read_text(run.path / ADDRESS_FILE).split()
        home = home_of(run)  # which knows its anchors
        return tuple(dict.fromkeys(address.check(item) for item in (*found, *(home.others if home else ()))))
    except FileNotFoundError:
        raise UserError(
            f"{run.name} has no address yet.",
            why="Its swarm has not started.",
            fix=f"See how far it is: {terminal.command('logs', run.path)}",
        ) from None


def invite(run: RunDir, name: str, seconds: float, role: Role) -> list[str]:
    """Make a token; what to tell the user."""
    return invited(owner_of(run.path), addresses_of(run), name, seconds, role)


def invited(owner: Owner, addresses: tuple[str, ...], name: str, seconds: float, role: Role) -> list[str]:
    """The lines that hold a new token. They are for a terminal and for nothing that is kept."""
    made = owner.invite(name, role, seconds)
    may = "average for others and give away the state" if role == "reducer" else "train"
    return [
        f"Until {date(made.grant.expires)} {name} may {may}. Whoever has this line may, so send it as you would a key:",
        # Not as an argument: everybody on a machine sees those of all processes.
        f"  {VARIABLE}={write_token(made, addresses)} {terminal.command('join')}",
    ]


def revoke(run: RunDir, name: str) -> str:
    """Revoke the invitations of that name, and tell the swarm; what to tell the user."""
    statement = owner_of(run.path).revoke(name)
    try:
        _tell(run, statement)
    except TrainkitError:
        return f"Revoked: {name}. The swarm does not answer from here; its creator reads it in the next round."
    return f"Revoked: {name}. The swarm knows."


def _tell(run: RunDir, statement: bytes) -> None:
    processes.require_hivemind()
    from trainkit.collaborative import trust
    from trainkit.collaborative.admission import Admission
    from trainkit.collaborative.dht import open_dht
    from trainkit.collaborative.signed_records import REVOKED

    key, addresses = owner_of(run.path).key, addresses_of(run)
    with (
        trust.identity(None, own_pass(key, "revoke"), Admission(key.public, open_run=True)) as identity,
        open_dht(identity, peers=addresses) as dht,
    ):
        dht.excluded.hear(REVOKED, statement)
        dht.publish_excluded(wait=True)
