"""The page: a template with its style and script, and the data as JSON that no text of a model can leave."""

import base64
import hashlib
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from rlft_fast.files import replacing
from rlft_fast.run import COLORS, PANELS, PHASE_COLORS, Timeline
from rlft_fast.view.contents import Contents, read_run

_UNSAFE = re.compile("[<>&]")


def write_view(runs: list[Path], output: Path, max_bytes: int = 16 * 2**20) -> None:
    """Writes one HTML file about one run, or about two runs beside each other. The file loads nothing else.

    Args:
        runs: one or two folders of runs, finished or not.
        output: path of the page.
        max_bytes: most bytes of the samples of a run, and of the numbers of its tokens. Older steps are left out,
            which the page says.

    Raises:
        ValueError: a folder is missing, or holds no readable metrics, or has the path of the page.
    """
    contents = [read_run(run, max_bytes) for run in runs]
    page = _page(contents)
    with replacing(output) as file:
        file.write_text(page, encoding="ascii")


def _page(contents: list[Contents]) -> str:
    style, script = _template("page.css"), _template("page.js")
    data = {
        "panels": PANELS, "colors": COLORS, "phases": PHASE_COLORS,
        "runs": [
            {"name": run.name, "notes": run.notes, "series": run.series, "steps": sorted(run.samples)}
            | ({} if run.timeline is None else {"timeline": _timeline(run.timeline)})
            for run in contents
        ],
    }  # fmt: skip
    blocks: dict[str, Any] = {"data": data}
    for i, run in enumerate(contents):
        blocks |= {f"samples-{i}-{step}": samples for step, samples in run.samples.items()}
        blocks |= {f"tokens-{i}-{step}": columns for step, columns in run.tokens.items()}
        blocks |= {f"texts-{i}": run.texts, f"thumbnails-{i}": run.thumbnails}
    parts = {
        "style": style, "script": script, "style_hash": _hash(style), "script_hash": _hash(script),
        "data": "\n".join(_block(name, value) for name, value in blocks.items()),
    }  # fmt: skip
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _template("page.html"))


def _timeline(timeline: Timeline) -> dict[str, Any]:
    rows = [
        {
            "name": row.name,
            "idle": round(row.idle, 4),
            "spans": [[x, round(a, 3), round(b, 3)] for x, a, b in row.spans],
        }
        for row in timeline.rows
    ]
    left_out = timeline.num_rows - len(rows)
    return {"steps": timeline.steps, "seconds": timeline.seconds, "rows": rows, "left_out": left_out}


def _template(name: str) -> str:
    return files("rlft_fast.view").joinpath(name).read_text(encoding="ascii")


def _hash(text: str) -> str:
    """A source of a Content-Security-Policy that admits this text alone."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _block(name: str, value: Any) -> str:
    """Data that the script reads by name. It is ASCII without a character that could end the block or begin a tag."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    escaped = _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    return f'<script type="application/json" id="{name}">{escaped}</script>'
