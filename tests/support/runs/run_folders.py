"""Folders of runs as `rlft-fast view` reads them, with texts that must not become markup."""

import json
from pathlib import Path

# Markup, the end of a script block, separators of lines that end a JavaScript string, what moves a cursor or turns
# text around, and half a character.
HOSTILE = (
    "<script>alert(1)</script>", "</script><!--", "<img src=x onerror=alert(1)>", "{{script}} {{data}}", "\u2028\u2029",
    "\x00\x1b[31mred\x07", "\u202eabc", "\ud800", "&lt;b&gt; &amp;",
)  # fmt: skip


def write_lines(path: Path, rows) -> None:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def sample(step: int, completion: str = "answer", **fields):
    defaults = {"prompt": "question", "reward": 0.5, "parts": {"right": 0.5}, "finish_reason": "stop"}
    return {"step": step, "completion": completion, "weight_version": step, **defaults, **fields}


def write_run(folder: Path, samples=(), metrics=({"step": 1, "reward_mean": 0.5},)) -> Path:
    folder.mkdir()
    write_lines(folder / "metrics.jsonl", metrics)
    write_lines(folder / "samples.jsonl", samples)
    return folder
