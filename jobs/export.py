"""``python -m jobs.export RUN FILE``: write the model of a checkpoint into one file that works without trainkit."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs import cli
from trainkit.common.errors import RefusedError, UserError
from trainkit.run.folder import RunDir

_ENDS = {"safetensors": ".safetensors", "torch": ".pt2", "onnx": ".onnx"}


def parser() -> cli.Parser:
    parser = cli.Parser("export", __doc__).taking("run")
    add = parser.add_argument
    add("file", metavar="FILE", help="the file to write; an existing one is replaced once the new one is complete")
    parser.taking("overrides", "--checkpoint", "--weights", "--allow-code")
    forms = "weights (safetensors), torch.export (torch) or ONNX (default: by the ending of FILE: "
    add("--format", choices=tuple(_ENDS), help=f"{forms}{', '.join(_ENDS.values())})")
    add("--card", action="store_true", help="also write a model card beside FILE: README.md for the Hugging Face Hub")
    hub = "also upload FILE and the card to this repository, with your token; a new repository is private"
    add("--to-hub", metavar="OWNER/NAME", help=hub)
    return parser


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Parse, write, say what was written."""
    args = parser().parse_intermixed_args(argv)
    file = Path(args.file).expanduser()
    forms = list(_ENDS)
    if args.format:
        forms = [args.format]
    form = next((form for form in forms if _ENDS[form] == file.suffix), None)
    if form is None:
        fix = f"Give {' or '.join(file.with_suffix(_ENDS[form]).name for form in forms)}."
        what = f"'{file.name}' is not a file name of {' or '.join(forms)}."
        raise UserError(what, why="Libraries recognise the format by the ending.", fix=fix)
    if args.card:
        from trainkit.report.writers import place_of_card

        place_of_card(file.parent)  # or it is refused once the model is written
    with cli.run_to_read(args.run, env) as run:
        imports = True
        try:
            config = cli.settings_to_read(run, args, "export")
        except RefusedError:
            if form != "safetensors":
                raise
            from trainkit.config.loading import load

            imports = False  # weights are data
            config = load(str(run.config), args.overrides).config
        from trainkit.inference.export import export_model, told_of_weights
        from trainkit.inference.hub import require_hub, to_hub

        # What is refused is refused before FILE is replaced.
        if args.to_hub:
            require_hub(args.to_hub)
        if (args.card or args.to_hub) and form == "safetensors":
            _require_told(told_of_weights(config, run, args.checkpoint, args.weights, imports=imports)[0], file.name)
        done = export_model(config, run, args.checkpoint, args.weights, file, form, imports=imports)
        card = _card(run, done.about, file.name) if args.card or args.to_hub else ""
    print(f"{file}: the {'averaged ' if done.kind == 'ema' else ''}weights of step {done.step} ({args.checkpoint}).")
    if done.remark:
        print(f"It {done.remark}.")
    if args.card:
        from trainkit.report.writers import write_card

        print(f"{write_card(card, file.parent)}: its card.")
    if args.to_hub:
        print(f"{to_hub(args.to_hub, file, card, done.about, replace_card=args.card)}: sent.")
    return 0


def _require_told(about: Mapping[str, Any], file: str) -> None:
    if not about:
        why = "The checkpoint does not say which images the model takes."
        raise UserError(f"{file} has no card.", why=why, fix="Name the data with data.root=FOLDER, or omit --card.")


def _card(run: RunDir, about: Mapping[str, Any], file: str) -> str:
    from trainkit.report.facts import Facts
    from trainkit.report.writers import card

    return card(Facts(run, run.name), about, file)


if __name__ == "__main__":
    cli.run(main)
