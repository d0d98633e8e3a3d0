"""What the commands of all peers share: their flags, and the folder of their run."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from jobs import cli
from trainkit import fileio, terminal
from trainkit.config.loading import to_yaml
from trainkit.config.schema import Config
from trainkit.errors import UserError
from trainkit.ranks.env import NO_SECRET, RankEnv, Secret
from trainkit.run.folder import RunDir, next_path, runs_root
from trainkit.run.metrics import read_metrics
from trainkit.swarm.admission import Entry
from trainkit.swarm.link import rate_of


def add_peer_flags(parser: argparse.ArgumentParser, *, host: str | None) -> None:
    """The flags that every peer has."""
    invited = "the name of the invitation, else " if host is None else ""
    parser.add_argument("--name", help=f"how others see this peer (default: {invited}{peer_name()})")
    default = host or "0.0.0.0 with --public"
    parser.add_argument("--host", default=host, help=f"address to listen on (default: {default})")
    parser.add_argument("--port", type=int, default=0, help="TCP port to listen on (default: any free one)")
    kept = "keep this peer's key here, and so its id and address; what it contributes is credited to its name anyway"
    parser.add_argument("--identity", type=Path, metavar="FILE", help=kept)
    parser.add_argument(
        "--max-upload", metavar="RATE", help="send no more than fits into this, as 20Mbit (default: what is measured)"
    )
    parser.add_argument("--run-dir", type=cli.new_folder, metavar="FOLDER", help="folder to make for this run")


def check_peer_flags(args: argparse.Namespace) -> None:
    """Refuse a port that does not exist, and a name that would not fit into a record."""
    if not 0 <= args.port < 65536:
        raise UserError(f"--port {args.port} does not exist.", why="Ports go from 1 to 65535.", fix="Use --port 4711.")
    if args.name is not None and not 0 < len(args.name) <= terminal.LONGEST_NAME:
        why = f"It has 1 to {terminal.LONGEST_NAME} characters."
        raise UserError("--name is too long or empty.", why=why, fix="Use a short one.")


def take_part(
    args: argparse.Namespace,
    entry: Entry,
    overrides: Sequence[str],
    env: Mapping[str, str],
    *,
    role: Literal["peer", "anchor"],
    host: str | None,
    ranks: RankEnv | None = None,
    secret: Secret = NO_SECRET,
) -> tuple[str, RunDir | None]:
    """Join by the flags that every peer has. How it ended, and the run folder.

    Args:
        role: an anchor does not train.
        host: address to listen on; None: call out only.
        ranks: see `trainkit.swarm.peer.join_swarm`.
    """
    from trainkit.ranks.signals import stop_on_signal
    from trainkit.swarm.address import announced
    from trainkit.swarm.peer import by_hand, join_swarm, leave_on_interrupt

    with by_hand() as peer, stop_on_signal() as stop, leave_on_interrupt(stop, peer.say):
        return join_swarm(
            entry,
            overrides=overrides,
            open_run=lambda config, name: peer.begin(make_run(config, args.run_dir, f"{name}-{role}", env)),
            name=args.name or entry.name or peer_name(),
            host=host,
            port=args.port,
            max_upload=rate_of(args.max_upload) if args.max_upload else None,
            identity=args.identity,
            allow_code=args.allow_code,
            stop=stop,
            say=peer.say,
            announce=announced(args.announce, args.port),
            ranks=ranks,
            secret=secret,
            trains=role == "peer",
        )


def make_run(config: Config, path: Path | None, name: str, env: Mapping[str, str]) -> RunDir:
    """The run folder of a peer, with its manifest."""
    from trainkit.run.snapshot import write_manifest
    from trainkit.swarm.invitations import looks_like

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
    """How others see a peer of this machine."""
    user = os.environ.get("USER") or os.environ.get("LOGNAME") or "peer"
    return f"{user}@{socket.gethostname()}"


def say_end(ending: str, run_dir: RunDir | None) -> None:
    """What a peer's run came to."""
    from trainkit.monitor.follow import summary_lines

    endings = {"finished": "All rounds are done.", "stopped": "Left the swarm.", "ended": "The creator ended the run."}
    found = [] if run_dir is None else [*_given(run_dir), *summary_lines(run_dir)]
    print("\n".join([endings[ending], *found]))
    if ending == "stopped" and run_dir is not None and (run_dir.path / "swarm.json").exists():
        print(f"Go on with it: {terminal.command('resume', run_dir.path)}")


def _given(run_dir: RunDir) -> list[str]:
    """What this peer has given to the others, in a line; none, if it has met nobody."""
    told = [{key: record.get(key, 0) for key in ("peers", "bytes_up")} for record in read_metrics(run_dir, "train")]
    together = [record for record in told if all(map(fileio.is_number, record.values())) and record["peers"] > 1]
    if not together:
        return []
    sent = sum(record["bytes_up"] for record in together)
    return [f"Averaged with others in {len(together):,} rounds, {terminal.size(int(sent))} sent."]
