"""``python -m jobs.swarm create PRESET | invite NAME | revoke NAME | status [TOKEN|RUN]``: collaborative runs.

create   start a swarm on this machine, train in it, and print the command with which others join
invite   print a token that admits one more peer; it expires by itself
revoke   end the invitations of a name: peers that use them are cut off at once
anchor   average for a swarm on a machine that others can reach, keep its weights, admit newcomers; no training
doctor   say what keeps this machine from joining a swarm; without a token, how others would reach one created here
unban    admit a peer again that was banned after three bad rounds
stop     end a swarm that was created here, for everybody
status   show peers, rounds and loss of a swarm: by a token, of a run, or of the newest run here
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs import cli, output
from jobs.join import add_peer_flags, entry_in, make_run, peer_name, place_of, say_end, take_part
from trainkit.cluster.job_states import require_no_job
from trainkit.common import fileio, jsonl, terminal
from trainkit.common.errors import DiskError, UserError
from trainkit.launch.follow import cancel
from trainkit.run.find import find_run
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of

if TYPE_CHECKING:
    from trainkit.config.schema import Config
    from trainkit.swarm.identity.invitations import Role
    from trainkit.swarm.peer.place import PeerSpec
    from trainkit.swarm.peer.status import PeerRow, View

WATCH_SECONDS = 2.0
"""Seconds between two questions of ``status --watch``."""
# Of --expires, in seconds.
_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_LONGEST_SECONDS = 366 * 86400.0
# What is said of NAME.
_NAMES = {
    "invite": "name of the invited person; `revoke` takes the same name",
    "revoke": "the name that was given to `invite`",
    "unban": "the name, as the run printed it",
}
_TRUST = """trust this peer: it averages for others, hands out and signs the run's weights, bans peers, and acts for you
while you are away. While you train, its impossible averages are not used, and three in a row ban it; slightly wrong
averages are accepted, and everything is while you are away"""


def parser() -> cli.Parser:
    return cli.verb_parser("swarm", __doc__ or "", VERBS)


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    return cli.run_verb(parser(), VERBS, argv, env)


def _parser(verb: str) -> cli.Parser:
    parser = cli.Parser(f"swarm {verb}", _FUNCTIONS[verb].__doc__ or "")
    add = parser.add_argument
    if verb in _NAMES:
        add("name", metavar="NAME", help=_NAMES[verb])
    if verb in _NAMES or verb == "stop":
        add("run", nargs="?", metavar="RUN", help="default: the newest swarm of this folder")
    if verb == "create":
        add("preset", nargs="?", metavar="PRESET", help="usually hivemind")
        add("overrides", nargs="*", metavar="section.key=value")
        add_peer_flags(parser)
        add("--no-train", action="store_true", help="only average, check contributions and keep the records")
        through = "behind a router: others reach this machine through that one, which runs the anchor that this prints"
        add("--through", metavar="HOST[:PORT]", help=through)
        add("--resume", metavar="RUN", help="continue a swarm, under its old address or at --host, --port")
        add("--force", action="store_true", help="with --resume: confirm that it runs nowhere else")
        parser.taking("--allow-code")
    elif verb == "invite":
        add("--expires", default="7d", metavar="7d", help="lifetime of the token: 30m, 12h, 7d, 4w (default: 7d)")
        add("--reduce", action="store_true", help=_TRUST)
    elif verb == "anchor":
        add("words", nargs="*", metavar="TOKEN", help="a token made with --reduce; and settings, data.root=...")
        add("--carry", action="store_true", help="let others through to a creator behind a router (create --through)")
        parser.taking("--allow-code")
        add_peer_flags(parser)
    elif verb == "doctor":
        file = "a file with the token, or -; none: look at how others would reach a swarm that is created here"
        add("words", nargs="*", metavar="TOKEN", help=file)
        parser.taking("--json")
    elif verb == "status":
        which = "a token, a file with one, or a run; default: the newest swarm"
        add("swarm", nargs="?", metavar="TOKEN|RUN", help=which)
        either = parser.add_mutually_exclusive_group()  # an object has an end
        either.add_argument("-w", "--watch", action="store_true", help="refresh until Ctrl-C")
        either.add_argument("--json", action="store_true", help="print an object, for programs")
        add("--leaderboard", action="store_true", help="show how much each peer has contributed")
    return parser


def _create(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Start a swarm on this machine, train in it, and keep its records."""
    from trainkit.config.loading import load
    from trainkit.run.ownership import require_own_code
    from trainkit.run.secrets import refuse_settings

    if args.resume is not None:
        return _resume(args, env)
    if args.preset is None:
        _parser("create").error("the following arguments are required: PRESET")
    from trainkit.launch import preparation
    from trainkit.swarm.peer.entry_points import create_swarm, terminal_peer, through

    loaded = load(args.preset, args.overrides, env=env)
    require_own_code(Path(args.preset).expanduser(), loaded, allow_code=args.allow_code)
    refuse_settings(loaded)
    if not args.no_train:  # else the data need not be here
        (loaded,) = preparation.settled([loaded])
    place = place_of(args, port=loaded.config.collaborative.port)
    if args.through:
        place = through(args.through, place)

    def make(config: Config, _: str) -> RunDir:
        run = make_run(config, args.run_dir, loaded.name, env)
        if not args.no_train:
            preparation.record_data([run], [config])
        return run

    with terminal_peer(make, _again(args)) as hooks:
        ending, run = create_swarm(loaded.config, replace(place, trains=not args.no_train), hooks)
    say_end(ending, run)
    return 0


def _invite(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Print a token that admits somebody to a swarm that was created here."""
    from trainkit.swarm.peer import owner
    from trainkit.swarm.peer.owner import KEY_FILE, run_with

    seconds = _seconds_of(args.expires)
    run = run_with(KEY_FILE, args.run, env)
    found = owner.owner_of(run.path)
    addresses = owner.addresses_of(run)
    role: Role = "reducer" if args.reduce else "volunteer"
    with _writing_to(run):
        print(*owner.invite(found, addresses, args.name, seconds, role), sep="\n")
    return 0


def _revoke(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """End the invitations of a name, in a swarm that was created here."""
    from trainkit.swarm.peer import owner
    from trainkit.swarm.peer.owner import KEY_FILE, run_with

    run = run_with(KEY_FILE, args.run, env)
    with _writing_to(run):
        print(owner.revoke(run, args.name))
    return 0


def _unban(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Let a banned peer take part again, in a swarm that was created here."""
    from trainkit.swarm.identity.bans import BANS_FILE, Bans
    from trainkit.swarm.peer.owner import run_with
    from trainkit.swarm.peer.place import ADDRESS_FILE

    run = run_with(ADDRESS_FILE, args.run, env)
    name = terminal.name(args.name)
    bans = Bans(run.path / BANS_FILE)
    lifted = bans.lift(args.name)
    if not lifted:
        names = sorted({terminal.name(ban.name) for ban in bans.read().values()})
        why = f"Banned peers: {', '.join(names[:20]) or 'none'}."
        fix = "Give the name as the run printed it, or add the run's name."
        raise UserError(f"Nobody called {name} is banned from {run.name}.", why=why, fix=fix)
    many = f" ({len(lifted)} bans)" if len(lifted) > 1 else ""
    print(f"{name} may take part again from the next round of {run.name}{many}.")
    return 0


def _seconds_of(text: str) -> float:
    """``7d``, ``12h``, ``30m``, ``2w`` in seconds.

    Raises UserError for anything else, and for more than a year.
    """
    match = re.fullmatch(r"(\d{1,6})([mhdw])", text)
    seconds = 0.0
    if match:
        seconds = int(match[1]) * _UNITS[match[2]]
    if not 0.0 < seconds <= _LONGEST_SECONDS:
        why = "It takes a number followed by m, h, d or w, at most a year."
        raise UserError(f"--expires {text} is not a duration.", why=why, fix="Use --expires 7d.")
    return seconds


def _writing_to(run: RunDir) -> AbstractContextManager[None]:
    """Say in words what the disk of the run's folder refuses. Raises DiskError."""
    what, more = f"Cannot write to {run.path}.", "The run itself continues; this command had no effect."
    return fileio.disk_errors_as(what, fix="Fix that, and repeat the command.", more=more, kind=DiskError)


def _stop(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """End a swarm that was created here, for everybody. Its checkpoints stay, and `resume` continues from them."""
    from trainkit.swarm.peer.owner import KEY_FILE, run_with

    cancel([run_with(KEY_FILE, args.run, env)])
    return 0


def _status(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Show peers, rounds and loss of a swarm."""
    from trainkit.swarm.peer.status import looking

    lines = leaderboard_lines if args.leaderboard else status_lines
    with looking(args.swarm, env) as look:
        if args.watch:
            terminal.watch(lambda: "\n".join(lines(look())), every=WATCH_SECONDS)
        view = look()
    if args.json:
        from jobs.measured_shapes import SwarmStatus

        output.emit(SwarmStatus.model_validate(as_object(view)))
    else:
        print("\n".join(lines(view)))
    return 0


def _anchor(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Keep a swarm together on a machine that others can reach, without training."""
    entry, overrides = entry_in(args, env)
    place = replace(place_of(args, entry), trains=False)
    if args.carry:
        from trainkit.swarm.peer.entry_points import carrying

        entry, place = carrying(entry, place)
    return take_part(args, entry, place, [*overrides, "launch.gpus_per_node=0"], env)


def _doctor(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Say what keeps this machine from joining a swarm, or how others would reach one that is created here."""
    from jobs.shapes import Checked, Doctor
    from trainkit.swarm.identity.invitations import TOKEN_VARIABLE, entry_of
    from trainkit.swarm.peer.doctor import examine, examine_for_creator

    joins = bool(args.words or env.get(TOKEN_VARIABLE))
    findings = examine(entry_of(args.words, env), env) if joins else examine_for_creator(env)
    # Exit code 0: all is well; 2: this machine lacks something; 1: the swarm does.
    worst = 0
    told = []
    for finding in findings:
        told.append(Checked.model_validate(asdict(finding)))
        print(*finding.lines(), sep="\n", flush=True)
        worst = max(worst, finding.exit_code)
    if output.is_on():
        output.emit(Doctor(can_join=worst == 0, findings=told))
    what = "join" if joins else "create a swarm"
    print(f"This machine can {what}." if worst == 0 else f"This machine cannot {what} as it is.")
    return worst


_FUNCTIONS = {it.__name__[1:]: it for it in (_create, _invite, _revoke, _unban, _stop, _anchor, _doctor, _status)}
VERBS = {verb: cli.Verb(partial(_parser, verb), function) for verb, function in _FUNCTIONS.items()}


def resume_by_hand(run: RunDir, args: argparse.Namespace, argv: Sequence[str]) -> int:
    """``python -m jobs.resume RUN``, of such a run. Resources are this machine's, so that their flags mean nothing.

    Args:
        argv: as it was typed.
    """
    from trainkit.swarm.peer.place import PeerSpec

    extra = [word for word in argv if word not in {args.run, "--allow-code", "--force"}]
    if extra:
        why = "This swarm was created by hand and continues in this terminal."
        fix = f"Omit it: {terminal.command('resume', run.path)}"
        raise UserError(f"{extra[0]} has no effect on {run.name}.", why=why, fix=fix)
    return _go_on(run, PeerSpec(peer_name()), args)


def _resume(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """``python -m jobs.swarm create --resume RUN``."""
    from trainkit.swarm.peer.place import PeerSpec

    asked = {"--identity": args.identity, "--run-dir": args.run_dir, "--max-upload": args.max_upload}
    given = [args.preset, *args.overrides, *(flag for flag in asked if asked[flag])]
    given = list(filter(None, given))
    if given:
        why = "the run already has its settings, its key and its folder"
        _parser("create").error(f"{given[0]} does not go with --resume: {why}")
    run = find_run(args.resume, env)
    if history_of(run).finished:
        fix = f"Start a new one with its settings: {terminal.command('swarm', 'create', run.path)}"
        raise UserError(f"{run.name} has finished.", why="All of its rounds are done.", fix=fix)
    # Where the swarm was counts as far as the flags do not say otherwise.
    where = {"host": args.host, "port": args.port, "announce": args.announce}
    place = PeerSpec(args.name or peer_name(), trains=not args.no_train, **where)
    if args.through:
        from trainkit.swarm.peer.entry_points import through

        place = through(args.through, place)
    return _go_on(run, place, args)


def _again(args: argparse.Namespace) -> list[str]:
    """Flags that a creator is given once more when it comes back; all else is in its run folder."""
    return [flag for flag in ("--allow-code", "--no-train") if getattr(args, flag[2:].replace("-", "_"), False)]


def _go_on(run: RunDir, place: PeerSpec, args: argparse.Namespace) -> int:
    from trainkit.config.loading import load
    from trainkit.run.ownership import require_own_code

    require_no_job(run, force=args.force)
    loaded = load(str(run.config))
    require_own_code(run.path, loaded, allow_code=args.allow_code)
    from trainkit.swarm.peer.entry_points import resume_swarm, terminal_peer

    with terminal_peer(lambda config, _: run, _again(args)) as hooks:
        ending, ended = resume_swarm(run, loaded.config, place, hooks)
    say_end(ending, ended)
    return 0


# What `status` prints: tables that fit the terminal, and an object for programs.


def _cells(row: PeerRow) -> tuple[str, ...]:
    said = row.said
    alone = f"of {said.group}" if said.group else "alone"
    return (
        terminal.one_line(said.name, _LONGEST_NAME),
        row.role,
        str(row.round),
        f"{said.parts}/{said.expected}" if said.expected else alone,
        f"{said.samples:,}",
        f"{said.samples_per_sec:,.0f}",
        f"{said.loss:.4f}",
        terminal.size(said.sent) if said.sent else "-",
        terminal.size(said.received) if said.received else "-",
        f"{terminal.age(row.seconds_ago)} ago",
        f"..{row.peer[-6:]}",
    )


_PEERS = ("peer", "role", "round", "parts", "samples", "samples/s", "loss", "up", "down", "seen", "id")
# What a narrow terminal does without, in this order.
_DISPENSABLE_OF_PEERS = ("id", "samples", "seen", "loss", "down", "up", "role", "round", "parts")
# Of what a peer says, a program is told this.
_SAID = ("name", "group", "parts", "expected", "samples", "samples_per_sec", "loss", "sent", "received")
_LEADERBOARD = ("name", "samples", "share", "rounds", "hours", "bytes", "now")
_DISPENSABLE_OF_LEADERBOARD = ("now", "bytes", "rounds", "share", "hours")
_MOST_SHOWN = 100
# Characters of a name in a table: a long one would leave no room for the other columns. --json has all of it.
_LONGEST_NAME = 24


def status_lines(view: View) -> list[str]:
    """The text of ``status``."""
    peers = len(view.peers)
    state = "running" if view.running else "not running"
    words = [f"{view.name}: {state}", f"round {view.round}/{view.rounds}", terminal.plural(peers, "peer")]
    if peers:
        words.append(f"{view.samples_per_sec:,.0f} samples/s")
    if view.loss is not None:
        words.append(f"loss {view.loss:.4f}")
    for key in (view.metrics.headline, "loss"):
        value = view.val.get(key)
        if value is not None:
            words.append(f"val {view.metrics.words(key, value)}")
            break
    lines = terminal.wrapped(", ".join(words))
    if peers:
        lines += _table(_PEERS, [_cells(row) for row in view.peers[:_MOST_SHOWN]], _DISPENSABLE_OF_PEERS)
    if peers > _MOST_SHOWN:
        lines.append(f"  {peers - _MOST_SHOWN} more peers are not shown; --json has them.")
    return lines


def leaderboard_lines(view: View) -> list[str]:
    """The text of ``status --leaderboard``: contributions by name."""
    if not view.contributions:
        return [f"{view.name}: no contributions yet, or its creator has not reported any."]
    whole = sum(item.samples for item in view.contributions)
    here = {row.credited for row in view.peers}
    rows = [
        (
            terminal.one_line(item.name, _LONGEST_NAME),
            f"{item.samples:,.0f}",
            f"{100 * item.samples / whole:.1f} %" if whole else "-",
            str(item.rounds),
            f"{item.seconds / 3600:,.2f}",
            terminal.size(item.bytes),
            "training" if item.name in here else "-",
        )
        for item in view.contributions
    ]
    title = f"{view.name}: round {view.round}/{view.rounds}, {whole:,.0f} samples of {len(rows)} contributors"
    return [*terminal.wrapped(title), *_table(_LEADERBOARD, rows, _DISPENSABLE_OF_LEADERBOARD)]


def as_object(view: View) -> dict[str, Any]:
    """Return the fields that a program may rely on; those that are not known are null."""
    plain: dict[str, Any] = jsonl.finite({**asdict(view), "samples_per_sec": view.samples_per_sec})
    del plain["metrics"]
    for row in plain["peers"]:
        said = row.pop("said")
        row |= {key: said[key] for key in _SAID}
    return plain


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], dispensable: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in terminal.table(header, rows, dispensable=dispensable, indent=2)]


if __name__ == "__main__":
    cli.run(main)
