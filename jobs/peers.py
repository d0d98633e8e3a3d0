"""Jobs that join a swarm somebody else has created: their configuration is its creator's."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.errors import UserError

if TYPE_CHECKING:
    from trainkit.config.loading import Loaded

MOST = 1000
"""Peers of one array: more are a slip of the pen."""


def loaded_to_join(
    args: argparse.Namespace, flags: Mapping[str, tuple[Any, str]], env: Mapping[str, str]
) -> tuple[Loaded, int, Mapping[str, str]]:
    """What each peer of ``submit --join TOKEN --array N`` is configured as, how many there are, and their environment.

    Raises UserError when the swarm does not answer, or the flags do not go together.
    """
    from trainkit.config.loading import load
    from trainkit.swarm import reader
    from trainkit.swarm.admission import VARIABLE, entry_of, warned
    from trainkit.swarm.settings import require_collaborative

    if args.join is None:
        raise UserError(
            "--array needs --join.", why="It adds so many peers to a swarm.", fix="Add --join TOKEN, or use --sweep."
        )
    for flag, given in (("--sweep", args.sweep), ("--host", args.host), ("--estimate", args.estimate)):
        if given:
            raise UserError(
                f"{flag} and --join do not go together.",
                why="What joins has the settings of the swarm's creator, which are asked for from here.",
                fix=f"Leave {flag} out.",
            )
    count = 1 if args.array is None else args.array
    if not 0 < count <= MOST:
        raise UserError(
            f"--array {count} is not possible.", why=f"It is a number of peers, 1 to {MOST}.", fix="Use --array 8."
        )
    require_collaborative(load(args.preset).config)
    entry = warned(entry_of([args.join] if args.join else [], env, name="submit"))
    run = reader.run_at(entry)
    peers = entry.addresses
    loaded = reader.as_peer(run, peers, args.overrides, flags=flags, env=env, allow_code=args.allow_code)
    # Jobs have the token from their environment, so that it is in no command line and in no folder.
    return loaded, count, {**env, VARIABLE: entry.text} if entry.invited else env


def loaded_rank(
    preset: str,
    where: str,
    overrides: Sequence[str],
    folder: Path | None,
    *,
    env: Mapping[str, str],
    allow_code: bool,
) -> tuple[Loaded, str]:
    """What one rank of ``train PRESET --join TOKEN`` is configured as, and its way in; a run that goes on is as it was.

    Raises UserError when the swarm does not answer.
    """
    from trainkit.config.loading import load
    from trainkit.ranks.env import RankEnv
    from trainkit.swarm import reader
    from trainkit.swarm.admission import entry_of, warned
    from trainkit.swarm.settings import require_collaborative

    entry = warned(entry_of([where] if where else [], env, name="train"))
    if folder is not None and (folder / "config.yaml").is_file():
        return load(str(folder / "config.yaml"), env=env), entry.text
    loaded = load(preset, [*overrides, f"collaborative.initial_peers=[{','.join(entry.addresses)}]"], env=env)
    require_collaborative(loaded.config)
    if not RankEnv.from_mapping(env).is_main:
        return loaded, entry.text  # rank 0 tells the others
    run = reader.run_at(entry)
    return reader.as_peer(run, entry.addresses, overrides, flags={}, env=env, allow_code=allow_code), entry.text


def without_token(argv: Sequence[str], token: str | None) -> list[str]:
    """The command line as it may be kept in a run folder."""
    return ["TOKEN" if token and token in word else word for word in argv]
