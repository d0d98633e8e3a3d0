"""``trainkit``, or ``python -m jobs``: list the verbs, presets, schema and templates, or run a verb."""

import ast
import importlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from jobs import cli
from trainkit.common import fileio, terminal
from trainkit.common.errors import UserError, did_you_mean


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """List the verbs; ``trainkit submit ...`` is ``python -m jobs submit ...``, or ``python -m jobs.submit ...``."""
    known = verbs(Path(__file__).parent)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print("\n".join(overview(known)))
        return 0
    verb = argv[0]
    if verb not in known:
        why = f"The commands are: {', '.join(known)}."
        fix = did_you_mean(verb, known, otherwise="`python -m jobs` describes each command.")
        raise UserError(f"Unknown command '{verb}'.", why=why, fix=fix)
    return importlib.import_module(f"jobs.{verb}").main(argv[1:], env) or 0


def verbs(folder: Path) -> dict[str, str]:
    """Verb -> the first line of its file's docstring, without the command. Nothing is imported.

    A verb is a file with a function ``main``.
    """
    found = {}
    for file in sorted(folder.glob("[a-z]*.py")):
        tree = ast.parse(fileio.read_text(file, follow=True))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[file.stem] = re.sub(r"^`+[^`]*`+: ", "", (ast.get_docstring(tree) or "").partition("\n")[0])
    return found


def overview(known: Mapping[str, str]) -> list[str]:
    """The lines of ``python -m jobs``."""
    configs = fileio.folder("configs")
    templates = fileio.folder("slurm")
    width = max(len(verb) for verb in known)
    lines = [f"{terminal.PROGRAM}VERB ...  (details: --help)", ""]
    lines += [f"  {verb:{width}}  {said}" for verb, said in known.items()]
    return [
        *lines,
        "",
        f"  presets    {configs}: {', '.join(sorted(file.stem for file in configs.glob('*.yaml')))}",
        f"  recipes    {configs / 'recipes'}",
        f"  schema     # yaml-language-server: $schema={configs / 'schema.json'}",
        f"  templates  {templates}: {', '.join(sorted(file.name for file in templates.glob('*.sbatch')))}",
        "",
        "Presets in your own folder configs/, and profiles in configs/clusters/, take precedence.",
        "Put the schema line at the top of a file, and editors complete settings and mark mistakes.",
    ]


if __name__ == "__main__":
    cli.run(main)
