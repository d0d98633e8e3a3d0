"""``python -m tests.docs``: write what docs/ generates from the code: the reference and the picture of the rooms."""

from __future__ import annotations

from tests.docs.reference import PROJECT, pages


def main() -> None:
    for file, text in pages().items():
        if not file.is_file() or file.read_text("utf-8") != text:
            file.write_text(text, "utf-8")
            print(f"wrote {file.relative_to(PROJECT)}")


if __name__ == "__main__":
    main()
