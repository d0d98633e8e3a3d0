"""``python -m jobs.completion SHELL``: complete verbs, flags, presets, runs and settings in bash, zsh or fish.

The command prints a script for the shell:

  bash  eval "$(trainkit completion bash)"     in ~/.bashrc
  zsh   eval "$(trainkit completion zsh)"      in ~/.zshrc, after compinit
  fish  trainkit completion fish | source      in ~/.config/fish/config.fish
"""

import argparse
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs import cli
from trainkit.common import terminal

_BASH = """
_trainkit() {
  _shtab_trainkit "$@"
  # A setting goes on after its `=`.
  [[ ${#COMPREPLY[@]} = 0 || ${COMPREPLY[0]} != *= ]] || compopt -o nospace
}
complete -o bashdefault -F _trainkit trainkit"""


def parser() -> cli.Parser:
    parser = cli.Parser("completion", __doc__ or "")
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish")
    return parser


def main(argv: Sequence[str], env: Mapping[str, str]) -> None:
    shell = parser().parse_args(argv).shell
    import shtab

    typed = terminal.PROGRAM
    terminal.PROGRAM = "trainkit "
    try:
        print(shtab.complete(whole_parser(), shell, root_prefix="trainkit") + (_BASH if shell == "bash" else ""))
    finally:
        terminal.PROGRAM = typed


def whole_parser() -> argparse.ArgumentParser:
    """The parser of ``trainkit`` with all its verbs; each argument knows what completes it."""
    from jobs.__main__ import verbs

    parsers: dict[str, argparse.ArgumentParser] = {}
    for verb, about in verbs(Path(__file__).parent).items():
        module = importlib.import_module(f"jobs.{verb}")
        below: Mapping[str, cli.Verb] = getattr(module, "VERBS", {})
        if below:
            parsers[verb] = _with_verbs(f"trainkit {verb}", {name: each.parser() for name, each in below.items()})
        else:
            parsers[verb] = module.parser()
        parsers[verb].description = about
    return _with_verbs("trainkit", parsers)


def _with_verbs(prog: str, parsers: Mapping[str, argparse.ArgumentParser]) -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(prog=prog)
    # argparse calls this to make the parser of a verb; ours exist already.
    verbs = whole.add_subparsers(parser_class=lambda prog, **_: parsers[prog.rpartition(" ")[2]])  # type: ignore[call-overload]
    by_metavar = _completions()
    for verb, each in parsers.items():
        verbs.add_parser(verb, help=(each.description or "").partition("\n")[0])
        for action in each._actions:
            how = by_metavar.get(str(action.metavar))
            if how is not None:
                action.complete = how  # type: ignore[attr-defined]  # where shtab looks
    return whole


def _completions() -> dict[str, Any]:
    """Metavar -> what completes such an argument."""
    import shtab

    from trainkit.config.json_schema import settings
    from trainkit.config.presets import PACKAGED, preset_descriptions
    from trainkit.config.schema import SECTIONS

    def words(*known: str, further: str = "") -> dict[str, Any]:
        return shtab.cmd(f"printf '%s\\n' {' '.join(known)}; {further}".removesuffix("; "))

    own_presets = "ls configs 2>/dev/null | sed -n 's/[.]yaml$//p'"
    runs = "ls runs 2>/dev/null"
    presets = sorted(preset_descriptions())
    keys = words(*dict.fromkeys(f"{item.key}=" for item in settings()))
    return {
        "PRESET": words(*presets, further=own_presets),
        "PRESET|SCRIPT.py|RUN": words(*presets, further=f"{own_presets}; {runs}; ls *.py 2>/dev/null"),
        "PRESET section.key=value": words(*presets, further=own_presets),
        "RUN": shtab.cmd(runs),
        "SECTION": words(*SECTIONS),
        "PROFILE": words(*sorted(file.stem for file in PACKAGED.glob("clusters/*.yaml"))),
        "section.key=value": keys,
        "FOLDER": shtab.DIRECTORY,
        "FILE": shtab.FILE,
    }


if __name__ == "__main__":
    cli.run(main)
