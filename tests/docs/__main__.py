"""``python -m tests.docs``: write what docs/ generates from the code, and build the site into the folder ``site``."""

import subprocess
import sys

from tests.docs.reference import PROJECT, pages

BUILD = [sys.executable, "-m", "zensical", "build", "--strict", "-f", ".mkdocs.yml"]


def main() -> int:
    for file, text in pages().items():
        if not file.is_file() or file.read_text("utf-8") != text:
            file.write_text(text, "utf-8")
            print(f"wrote {file.relative_to(PROJECT)}")
    return subprocess.run(BUILD, cwd=PROJECT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
