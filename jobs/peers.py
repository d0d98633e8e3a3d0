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
) -> tuple[Loaded, int]:
    """What each peer of ``submit --join TOKEN --array N`` is configured as, and how many there are.

    Raises UserError when the swarm does not answer, or the flags do not go together.
    """
    from trainkit.collaborative import address, asking
    from trainkit.collaborative.settings import require_collaborative
    from trainkit.config.loading import load

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
    where = address.check(args.join)
    run = asking.run_at(where)
    return asking.as_peer(run, [where], args.overrides, flags=flags, env=env, allow_code=args.allow_code), count


def loaded_rank(
    preset: str,
    where: str,
    overrides: Sequence[str],
    folder: Path | None,
    *,
    env: Mapping[str, str],
    allow_code: bool,
) -> Loaded:
    """What one rank of ``train PRESET --join TOKEN`` is configured as; a run that goes on is as it was.

    Raises UserError when the swarm does not answer.
    """
    from trainkit.collaborative import address, asking
    from trainkit.collaborative.settings import require_collaborative
    from trainkit.config.loading import load
    from trainkit.ranks.env import RankEnv

    where = address.check(where or env.get("TRAINKIT_TOKEN", ""))
    if folder is not None and (folder / "config.yaml").is_file():
        return load(str(folder / "config.yaml"), env=env)
    loaded = load(preset, [*overrides, f"collaborative.initial_peers=[{where}]"], env=env)
    require_collaborative(loaded.config)
    if not RankEnv.from_mapping(env).is_main:
        return loaded  # rank 0 tells the others
    return asking.as_peer(asking.run_at(where), [where], overrides, flags={}, env=env, allow_code=allow_code)


def without_token(argv: Sequence[str], token: str | None) -> list[str]:
    """The command line as it may be kept in a run folder."""
    return ["TOKEN" if token is not None and token in word else word for word in argv]
