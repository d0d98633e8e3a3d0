"""A picture of the house, drawn from the imports: the rooms on their floors, and in each room which others it uses.

A room that is used by way of another is not named, so that the picture changes only where the house does.
"""

from html import escape

from tests.test_architecture import FLOORS, imports, ours, room

WIDTH, HEIGHT, GAP = 1000, 50, 8
LETTER, SMALL = 8.2, 5.7
STYLE = (
    "text{font-family:system-ui,sans-serif;text-anchor:middle}.name{font-size:14px;font-weight:600;fill:#1e1b4b}"
    ".uses{font-size:10.5px;fill:#64748b}.room{fill:#eef2ff;stroke:#a5b4fc}"
)


def uses() -> dict[str, list[str]]:
    """Room -> the rooms below that it imports, without those that it reaches by another of them."""
    found: dict[str, set[str]] = {name: set() for floor in FLOORS for name in floor if name != "trainkit"}
    for item in imports():
        here, there = room(item.importer), room(item.module)
        if ours(item.module) and here != there and here in found and there in found and not item.types_only:
            found[here].add(there)
    below: dict[str, set[str]] = {}
    for name in found:  # from the ground up: what is below is known before
        below[name] = found[name].union(*(below.get(other, set()) for other in found[name]))
    return {
        name: sorted(other for other in others if not any(other in below[via] for via in others - {other}))
        for name, others in found.items()
    }


def rooms() -> str:
    """The picture, as SVG."""
    used = uses()
    floors = [floor for floor in FLOORS if floor != ["trainkit"]][::-1]
    tall = len(floors) * (HEIGHT + GAP) + GAP
    drawn = []
    for number, floor in enumerate(floors):
        texts = [(label(name), ", ".join(map(label, used[name]))) for name in floor]
        widths = [max(len(name) * LETTER, len(small) * SMALL) + 20 for name, small in texts]
        spare = (WIDTH - GAP * (len(floor) + 1) - sum(widths)) / len(floor)
        x, y = float(GAP), GAP + number * (HEIGHT + GAP)
        for (name, small), least in zip(texts, widths, strict=True):
            width = least + spare
            drawn += [
                f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{HEIGHT}" rx="6" class="room"/>',
                f'<text x="{x + width / 2:.0f}" y="{y + (22 if small else 30)}" class="name">{escape(name)}</text>',
                f'<text x="{x + width / 2:.0f}" y="{y + 39}" class="uses">{escape(small)}</text>' * bool(small),
            ]
            x += width + GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {tall}" width="{WIDTH}" height="{tall}">'
    back = f'<rect width="{WIDTH}" height="{tall}" fill="#ffffff"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", back, *filter(None, drawn), "</svg>", ""])


def label(name: str) -> str:
    return name.removeprefix("trainkit.")
