"""``python -m jobs.export RUN FILE``: a checkpoint's weights as one file that timm and torchvision load."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from jobs import cli
from trainkit.errors import UserError


def parser() -> cli.Parser:
    parser = cli.Parser("export", __doc__)
    parser.taking("run", "--checkpoint", "--weights")
    parser.add_argument("file", metavar="FILE.safetensors", help="replaced, once the new one is complete")
    return parser


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Parse, write, say what was written."""
    args = parser().parse_args(argv)
    from trainkit.config.loading import load

    file = Path(args.file).expanduser()
    if file.suffix != ".safetensors":
        why, fix = "Libraries go by its end.", f"Give {file.with_suffix('.safetensors')}."
        raise UserError(f"'{file.name}' is no name for a file of safetensors.", why=why, fix=fix)
    stems = {"raw": ("model",), "ema": ("ema",), None: ("ema", "model")}[args.weights]
    with cli.run_to_read(args.run, env) as run_dir:
        config = load(str(run_dir.config), []).config
        from trainkit.checkpoint.state import export

        notes = {"run": run_dir.name, "model": config.model.name, "data": config.data.name}
        step, stem = export(run_dir.checkpoints, args.checkpoint, stems, file, notes)
    print(f"{file}: the {'averaged ' if stem == 'ema' else ''}weights of step {step} ({args.checkpoint}).")
    return 0


if __name__ == "__main__":
    cli.run(main)
