"""``python -m jobs.export RUN FILE``: the model of a checkpoint as one file that is used without trainkit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jobs import cli
from trainkit.errors import RefusedError, UserError

_ENDS = {"safetensors": ".safetensors", "torch": ".pt2", "onnx": ".onnx"}


def parser() -> cli.Parser:
    parser = cli.Parser("export", __doc__).taking("run")
    parser.add_argument("file", metavar="FILE", help="replaced, once the new one is complete")
    parser.taking("overrides", "--checkpoint", "--weights", "--allow-code")
    forms = "weights (safetensors), torch.export (torch) or ONNX (default: by the end of FILE: "
    parser.add_argument("--format", choices=tuple(_ENDS), help=f"{forms}{', '.join(_ENDS.values())})")
    return parser


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Parse, write, say what was written."""
    args = parser().parse_intermixed_args(argv)
    file = Path(args.file).expanduser()
    form = args.format or next((form for form, end in _ENDS.items() if end == file.suffix), "safetensors")
    if file.suffix != _ENDS[form]:
        ends = [_ENDS[form]] if args.format else _ENDS.values()
        fix = f"Give {' or '.join(file.with_suffix(end).name for end in ends)}."
        what = f"'{file.name}' is no name for {f'a file of {args.format}' if args.format else 'an export'}."
        raise UserError(what, why="Libraries go by its end.", fix=fix)
    with cli.run_to_read(args.run, env) as run:
        imports = True
        try:
            config = cli.settings_to_read(run, args)
        except RefusedError:
            if form != "safetensors":
                raise
            from trainkit.config.loading import load

            config, imports = load(str(run.config), args.overrides).config, False  # weights are data
        from trainkit.export import export_model

        done = export_model(config, run, args.checkpoint, args.weights, file, form, imports=imports)
    print(f"{file}: the {'averaged ' if done.kind == 'ema' else ''}weights of step {done.step} ({args.checkpoint}).")
    if done.remark:
        print(f"It {done.remark}.")
    return 0


if __name__ == "__main__":
    cli.run(main)
