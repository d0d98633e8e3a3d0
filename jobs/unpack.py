"""``python -m jobs.unpack FILE``: restore a run from a file of `pack`, on any machine; its code is not run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from jobs import cli, flags
from trainkit.common import terminal


def parser() -> cli.Parser:
    parser = cli.Parser("unpack", __doc__ or "")
    parser.add_argument("file", metavar="FILE", type=Path, help="the archive")
    names = parser.add_mutually_exclusive_group()
    names.add_argument("--name", metavar="NAME", help="the run's name here: runs/NAME (default: its old name)")
    names.add_argument("--run-dir", type=flags.new_folder, metavar="FOLDER", help="the run folder to create")
    return parser


def main(argv: Sequence[str], env: Mapping[str, str]) -> None:
    args = parser().parse_args(list(argv))
    from trainkit.checkpoint import archive
    from trainkit.launch import submission
    from trainkit.run.find import runs_root

    file = args.file.expanduser().absolute()
    folder = args.run_dir
    if args.name is not None:
        folder = submission.named_folder(args.name, env)
    run = archive.unpack(file, (folder or runs_root(env) / archive.name_in(file)).absolute())
    print(f"Unpacked {run.name}. Trust it as much as the person who packed it: commands ask before they run its code.")
    print(f"  run folder  {terminal.path(run.path)}")
    print(f"  log book    {terminal.command('report', run.path)}")
    print(f"  new images  {terminal.command('predict', run.path, 'FOLDER')}")


if __name__ == "__main__":
    cli.run(main)
