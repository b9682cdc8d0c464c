"""What the reports share: bars, tables, versions, and the three files of a report."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

PEERS = ("transformers", "trl", "liger-kernel", "cut-cross-entropy", "triton")


class Bar(NamedTuple):
    """One number that must hold."""

    name: str
    value: float
    limit: float
    at_most: bool = True
    unit: str = ""

    @property
    def requirement(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.limit:g}{self.unit}"

    @property
    def holds(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit


def write_files(
    output: Path, name: str, title: str, facts: dict[str, str], sections: Sequence[str], raw: dict[str, Any],
    draw: Callable[[Path], None],
) -> str:  # fmt: skip
    """Writes NAME.md, NAME.json and NAME.png; returns the text of NAME.md.

    Args:
        output: folder, made if it is missing.
        name: of the files.
        title: of the report.
        facts: machine and versions, at the top.
        sections: headings and paragraphs, as Markdown.
        raw: the numbers.
        draw: makes the picture at a path.
    """
    top = f"# {title}", "\n".join(f"- {key}: {value}" for key, value in facts.items()), f"![]({name}.png)"
    text = "\n\n".join([*top, *sections]) + "\n"
    output.mkdir(parents=True, exist_ok=True)
    (output / f"{name}.md").write_text(text)
    (output / f"{name}.json").write_text(json.dumps(raw, indent=1) + "\n")
    draw(output / f"{name}.png")
    return text


def fill(text: str) -> str:
    """Wraps every paragraph at 120 characters."""
    return "\n\n".join(textwrap.fill(paragraph, 120) for paragraph in text.split("\n\n"))


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table whose columns line up; the first is text, the others numbers."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    rule = tuple("-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths))

    def line(row: tuple[str, ...]) -> str:
        cells = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        return f"| {' | '.join(cells)} |"

    return "\n".join(map(line, (header, rule, *rows)))


def bar_table(bars: list[Bar]) -> str:
    rows = [(bar.name, f"{bar.value:.3g}{bar.unit}", bar.requirement, "pass" if bar.holds else "FAIL") for bar in bars]
    return table(("bar", "measured", "required", "result"), rows)


def versions() -> dict[str, str]:
    found = {}
    for name in PEERS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
