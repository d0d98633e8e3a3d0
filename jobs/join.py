"""``TRAINKIT_TOKEN=... python -m jobs.join``: join a collaborative run with this machine.

`python -m jobs.swarm invite` prints a token; treat it as a password. Pass it in TRAINKIT_TOKEN, in a file, or with `-`
on standard input. As an argument it works too, but other users of this machine would see it in the list of processes.

The run's creator determines the settings. This peer only opens outgoing connections, so it works behind routers and in
notebooks. A peer that was invited with --reduce may add --public, so that others can connect to it; this takes load
off the creator.
"""

from __future__ import annotations

import argparse
import getpass
import math
import re
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jobs import cli, flags
from trainkit.common import terminal
from trainkit.common.errors import UserError
from trainkit.run.find import next_path, runs_root
from trainkit.run.folder import RunDir

if TYPE_CHECKING:
    from trainkit.config.loading import Loaded
    from trainkit.config.schema import Config
    from trainkit.swarm.identity.invitations import Entry
    from trainkit.swarm.peer.place import PeerSpec

# Of --max-upload, in Mbit.
_UNITS = {"k": 1e-3, "m": 1.0, "g": 1e3}


def parser() -> cli.Parser:
    parser = cli.Parser("join", __doc__ or "")
    words = "a file with the token, or -; then addresses to try first, and settings of this machine: data.root=..."
    parser.add_argument("words", nargs="*", metavar="TOKEN", help=words)
    public = "listen, so that other peers can connect to this one; --host, --port and --announce imply it"
    parser.add_argument("--public", action="store_true", help=public)
    parser.add_argument("--nproc", type=int, metavar="N", help="number of GPUs of this machine that form one peer (1)")
    add_peer_flags(parser)
    return parser.taking("--allow-code")


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Parse, join, say how it ended."""
    args = parser().parse_intermixed_args(argv)
    from trainkit.cluster.ranks import RankEnv
    from trainkit.config.loading import load
    from trainkit.swarm.identity.invitations import is_setting

    # Other ranks of this peer follow rank 0, who alone may read standard input.
    started = RankEnv.from_mapping(env)
    entry, overrides = entry_in(args, env) if started.is_main else (None, list(filter(is_setting, args.words)))
    listens = args.public or args.host or args.port or args.announce  # where to, says that it does
    place = place_of(args, entry, listens=bool(listens))

    from trainkit.swarm.peer.entry_points import follow_rank_0, ranks_of_peer

    with ranks_of_peer(args.nproc, argv, env) as (ranks, secret):
        if entry is None or not ranks.is_main:
            from trainkit.training.placement import wants_gpu

            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):  # rank 0's business
                signal.signal(number, signal.SIG_IGN)
            follow_rank_0(ranks, secret, use_gpu=wants_gpu(load("hivemind", overrides).config))
            return 0
        return take_part(args, entry, replace(place, env=ranks, secret=secret), overrides, env)


def add_peer_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that every peer has."""
    name = f"name that others see (default: the name of the invitation, else {peer_name()})"
    parser.add_argument("--name", help=name)
    parser.add_argument("--host", help="address to listen on (default: 0.0.0.0)")
    parser.add_argument("--port", type=int, default=0, help="TCP port to listen on (default: any free one)")
    router = "public address of the router that forwards the port, for the other peers"
    parser.add_argument("--announce", metavar="HOST[:PORT]", help=router)
    kept = "file for this peer's key, which keeps its id and address; contributions are credited to its name anyway"
    parser.add_argument("--identity", type=Path, metavar="FILE", help=kept)
    limit = "limit of the upload rate, as 20Mbit (default: the measured rate)"
    parser.add_argument("--max-upload", metavar="RATE", help=limit)
    parser.add_argument("--run-dir", type=flags.new_folder, metavar="FOLDER", help="new folder for this run")


def entry_in(args: argparse.Namespace, env: Mapping[str, str]) -> tuple[Entry, list[str]]:
    """The way into a swarm, by the words that are no settings; and those that are."""
    from trainkit.swarm.identity.invitations import entry_of, is_setting

    words = [word for word in args.words if not is_setting(word)]
    return entry_of(words, env), list(filter(is_setting, args.words))


def place_of(args: argparse.Namespace, entry: Entry | None = None, *, listens: bool = True, port: int = 0) -> PeerSpec:
    """A peer's place, by the flags that every peer has.

    Args:
        port: to listen on, where the flags say none.

    Raises UserError for a port that does not exist.
    """
    from trainkit.swarm.peer.place import PeerSpec
    from trainkit.swarm.protocol.addresses import announced

    if not 0 <= args.port < 65536:
        raise UserError(f"--port {args.port} does not exist.", why="Ports go from 1 to 65535.", fix="Use --port 4711.")
    name = args.name or (entry is not None and entry.name) or peer_name()
    place = PeerSpec(name[: terminal.LONGEST_NAME], port=args.port or port, identity=args.identity)
    if listens:
        where = announced(args.announce, place.port)
        place = replace(place, host=args.host or "0.0.0.0", announce=where)
    if args.max_upload:
        place = replace(place, max_upload=rate_of(args.max_upload))
    return place


def rate_of(text: str) -> float:
    """Bytes per second of ``--max-upload``: ``20Mbit``, ``500kbit`` or ``1Gbit/s``.

    Raises UserError.
    """
    from trainkit.swarm.protocol.addresses import MEGABIT

    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg])bit(?:/s)?", text.strip(), re.IGNORECASE)
    rate = 0.0
    if found:
        rate = float(found[1]) * _UNITS[found[2].lower()] * MEGABIT
    if not 0.0 < rate < math.inf:
        why = "It takes bits per second, as in a provider's contract."
        fix = "Write it as 20Mbit, 500kbit or 1Gbit."
        raise UserError(f"--max-upload {text} is not a link speed.", why=why, fix=fix)
    return rate


def take_part(
    args: argparse.Namespace, entry: Entry, place: PeerSpec, overrides: Sequence[str], env: Mapping[str, str]
) -> int:
    """Join, and say how it ended."""
    from trainkit.swarm.peer.entry_points import join_swarm, terminal_peer

    def make(config: Config, name: str) -> RunDir:
        return make_run(config, args.run_dir, f"{name}-{'peer' if place.trains else 'anchor'}", env)

    with terminal_peer(make) as hooks:
        ending, run = join_swarm(entry, place, hooks, overrides, allow_code=args.allow_code)
    say_end(ending, run)
    return 0


def make_run(config: Config, path: Path | None, name: str, env: Mapping[str, str]) -> RunDir:
    """The run folder of a peer, with its manifest."""
    from trainkit.config.loading import to_yaml
    from trainkit.run.run_manifest import write_manifest
    from trainkit.swarm.identity.invitations import looks_like

    while True:
        chosen = path or next_path(runs_root(env), name)
        try:
            run_dir = RunDir.create(chosen, to_yaml(config))
        except UserError:
            if path is not None or not chosen.exists():
                raise
            continue  # another peer that starts on this machine has taken that name meanwhile
        write_manifest(run_dir, ["TOKEN" if looks_like(word) else word for word in sys.argv])
        return run_dir


def peer_name() -> str:
    """Return the name by which others see a peer of this machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container has no entry for its user
        user = "peer"
    return f"{user}@{socket.gethostname()}"


def say_end(ending: str, run_dir: RunDir | None) -> None:
    """Print the outcome of a peer's run."""
    from trainkit.report.end_lines import summary_lines
    from trainkit.swarm.peer.owner import KEY_FILE

    endings = {
        "finished": "All rounds are done.",
        "stopped": "Left the swarm.",
        "ended": "The creator ended the run.",
        "moved": "The run continues elsewhere.",
    }
    print(endings[ending])
    if run_dir is None:
        return
    print(*summary_lines(run_dir), sep="\n")
    if ending == "stopped" and (run_dir.path / KEY_FILE).exists():  # its creator
        print(f"Go on with it: {terminal.command('resume', run_dir.path)}")


def loaded_rank(
    preset: str, where: str, overrides: Sequence[str], folder: Path | None, *, env: Mapping[str, str], allow_code: bool
) -> tuple[Loaded, str]:
    """Configure one rank of ``train PRESET --join TOKEN``, and return its way in; a run that goes on is as it was.

    Raises UserError when the swarm does not answer.
    """
    from trainkit.cluster.ranks import RankEnv
    from trainkit.config.loading import load
    from trainkit.swarm.identity.invitations import entry_of
    from trainkit.swarm.network import processes
    from trainkit.swarm.peer import status
    from trainkit.swarm.peer.same_run import require_collaborative

    entry = entry_of([where] if where else [], env)
    if folder is not None and (folder / "config.yaml").is_file():
        return load(str(folder / "config.yaml"), env=env), entry.text
    loaded = load(preset, [*overrides, f"collaborative.initial_peers=[{','.join(entry.addresses)}]"], env=env)
    require_collaborative(loaded.config)
    if not RankEnv.from_mapping(env).is_main:
        return loaded, entry.text  # rank 0 tells the others
    processes.require_hivemind()
    return status.as_peer(entry, overrides, flags={}, env=env, allow_code=allow_code), entry.text


if __name__ == "__main__":
    cli.run(main)
