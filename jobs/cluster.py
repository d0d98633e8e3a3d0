"""``python -m jobs.cluster discover|show|check``: examine a site, write its profile, check its nodes.

discover [NAME]   ask SLURM and this machine, and write configs/clusters/NAME.yaml (default: the cluster's own name)
show [NAME]       print what a profile says about its site; without a name, ask this site now
check             test nodes before a training: devices, disks, clocks, versions, network; name bad nodes;
                  with --train: prove that training works there
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs import cli, flags, output
from trainkit.common import fileio, terminal
from trainkit.common.errors import RefusedError, SchedulerError, UserError

if TYPE_CHECKING:
    from trainkit.cluster.site_profile import SiteFacts

TRAIN = "--train"


def parser() -> cli.Parser:
    return cli.verb_parser("cluster", __doc__ or "", VERBS)


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    if argv[:1] == ["check"] and TRAIN in argv and not {"-h", "--help"} & {*argv}:
        from jobs import bench

        words = [word for word in argv[1:] if word != TRAIN]
        return bench.main(["proof", *words], env)
    return cli.run_verb(parser(), VERBS, argv, env)


def _discover_parser() -> cli.Parser:
    parser = cli.Parser("cluster discover", "Examine this site and write its profile.")
    parser.add_argument("name", nargs="?", metavar="NAME", help="name of the profile (default: the cluster's own name)")
    renew = "update an existing profile: the facts about the site, not its settings"
    parser.add_argument("--force", action="store_true", help=renew)
    return parser


def _discover(args: argparse.Namespace, env: Mapping[str, str]) -> None:
    from trainkit.cluster.site_profile import lines, renewed, to_profile
    from trainkit.cluster.survey import NO_ANSWER, ask_site
    from trainkit.config.presets import OWN

    if args.name is not None:
        _require_free(OWN / "clusters" / f"{_plain(args.name)}.yaml", force=args.force)
    facts = _require_slurm(ask_site(env))
    path = OWN / "clusters" / f"{args.name or _plain(facts.cluster or 'site')}.yaml"
    _require_free(path, force=args.force)
    silent = [gap for gap in facts.gaps if NO_ANSWER in gap]
    if path.exists() and silent:
        why = f"It may hold what the scheduler does not answer now: {'; '.join(silent)}."
        fix = "Try again when `scontrol ping` and `sacctmgr -n show cluster` answer."
        raise SchedulerError(f"{path} was not changed.", why=why, fix=fix)
    fileio.make_folder(path.parent)
    text = to_profile(facts)
    if path.exists():
        text = renewed(fileio.read_text(path, follow=True), facts)
    fileio.write(path, text)
    print("\n".join(lines(facts)))
    print(f"\nWritten to {path}; use it with --cluster {path.stem}, or export TRAINKIT_CLUSTER={path.stem}.")


def _show_parser() -> cli.Parser:
    parser = cli.Parser("cluster show", "Print what is known about a site.")
    parser.add_argument("name", nargs="?", metavar="NAME", help="a profile (default: ask this site now; write nothing)")
    return parser.taking("--json")


def _show(args: argparse.Namespace, env: Mapping[str, str]) -> None:
    from trainkit.cluster.site_profile import lines, read_facts
    from trainkit.cluster.survey import ask_site
    from trainkit.config.loading import profile_layer
    from trainkit.config.presets import find_profile

    profile = None
    settings: dict[str, Any] = {}
    if args.name is None:
        known: SiteFacts | None = _require_slurm(ask_site(env))
    else:
        profile = str(find_profile(args.name))
        settings = {key: value for key, (value, _) in profile_layer(args.name).items()}
        known = read_facts(args.name)
    if output.is_on():
        from jobs.shapes import SiteAnswer

        output.emit(SiteAnswer(profile=profile, settings=settings, site=known))
        return
    if profile is not None:
        print(profile)
    for key, value in settings.items():
        print(f"  {key} = {value}")
    if known is None:
        print(f"  nothing is known about the site; there, run `{terminal.command('cluster', 'discover')}`")
    else:
        print("\n".join(lines(known)))


def _check_parser() -> cli.Parser:
    about = "Check devices, disks, clocks and network of nodes, and name bad nodes."
    parser = cli.Parser("cluster check", about)
    add = parser.add_argument
    train = "train briefly in every way that the nodes support, and report what passed; takes the flags of "
    add(TRAIN, action="store_true", help=f"{train}`bench proof`; exit code 1 if anything failed")
    add("--executor", metavar="NAME", help="auto, slurm, or local: this machine")
    add("--cluster", metavar="PROFILE", help="a site profile")
    flags.add_resource_flags(parser)
    return parser.taking("--json")


def _check(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    from trainkit.cluster.node_health import bad_nodes, findings, table
    from trainkit.cluster.survey import discover
    from trainkit.launch.node_check import check_nodes, check_plan
    from trainkit.run.find import runs_root

    folder = runs_root(env)
    plan, launch = check_plan(flags.launch_flags(args), discover(env), folder, env)
    report, here = check_nodes(plan, folder, env, interface=launch.interface)
    found = findings(report, here)
    bad = bad_nodes(found)
    if args.json:
        from jobs.measured_shapes import NodeCheck

        output.emit(NodeCheck.model_validate(report | {"findings": list(map(vars, found)), "bad": bad}))
    else:
        print("\n".join(table(report, found)))
    return 3 if bad else 0


VERBS = {
    "discover": cli.Verb(_discover_parser, _discover),
    "show": cli.Verb(_show_parser, _show),
    "check": cli.Verb(_check_parser, _check),
}


def _require_slurm(facts: "SiteFacts") -> "SiteFacts":
    if facts.partitions or facts.version:
        return facts
    from trainkit.cluster.survey import NO_ANSWER

    why = f"{'; '.join(facts.gaps)}."
    if NO_ANSWER in why:
        fix = "Try again when `scontrol ping` answers."
        raise SchedulerError("SLURM does not answer.", why=why, fix=fix)
    raise RefusedError("There is no SLURM here to describe.", why=why, fix="Do this on a login node of the cluster.")


def _plain(name: str) -> str:
    """A name that can be a file's."""
    if not re.fullmatch(r"[\w][\w.-]*", name):
        why = "It is used as a file name: letters, digits, '-', '_' and '.'."
        fix = f"For example: {terminal.command('cluster', 'discover', 'mysite')}."
        raise UserError(f"{name!r} cannot be the name of a profile.", why=why, fix=fix)
    return name


def _require_free(path: Path, *, force: bool) -> None:
    if path.exists() and not force:
        fix = "Give another name, or use --force to update its facts about the site; its settings stay."
        raise UserError(f"There is a profile {path} already.", why="Somebody may have written it by hand.", fix=fix)


if __name__ == "__main__":
    cli.run(main)
