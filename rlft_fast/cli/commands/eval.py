"""``rlft-fast eval MODEL CONFIG [--key value ...]``: a model's accuracy on the held-out prompts of a configuration."""

import json
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from rlft_fast.cli.keys import split_overrides
from rlft_fast.cli.parser import Parser, path
from rlft_fast.config import Config, ConfigError
from rlft_fast.errors import printable

_SECONDS_BETWEEN_LINES = 10.0


def run(arguments: list[str]) -> int:
    rest, overrides = split_overrides(arguments)
    options = _parser().parse_args(rest)
    if "model" in overrides:
        raise ConfigError(f"MODEL is {options.model}, and --model is {overrides['model']}: leave --model out")
    # checkpoint.best names a number that the sets of this evaluation may lack.
    given = {"checkpoint.best": "null", **overrides, "model": options.model}
    scoring = Config.load(options.config, given).reward.models
    sections = ["actor", *(f"reward.models.{name}" for name in scoring)]
    of_processes = {"shard_size": "-1", "sequence_parallel": "1"}  # the run may have had more
    alone = {f"{section}.{key}": value for section in sections for key, value in of_processes.items()}
    config = Config.load(options.config, given | {key: x for key, x in alone.items() if key not in overrides})
    if options.samples is not None and (os.path.lexists(options.samples) or not options.samples.parent.is_dir()):
        raise ValueError(f"--samples {options.samples} is there already, or its folder is missing: name a new file")
    from rlft_fast.trainer import evaluate
    from rlft_fast.world import World, leaving_process_group

    with leaving_process_group():
        with _Bar() as bar:
            metrics, answers = evaluate(config, bar.show)
        if World.current().is_first:
            try:
                if options.samples is not None:
                    _write(answers, options.samples)
            finally:  # a full disk does not cost the numbers
                _show(answers, options.show)
                print(json.dumps(metrics))
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="rlft-fast eval",
        usage="rlft-fast eval MODEL CONFIG [--show N] [--samples FILE] [--key value ...]",
        description="Answer the held-out prompts of a configuration, score the answers as a run would, and print the "
        "numbers as JSON. Every key of the configuration can be an option, as for rlft-fast train. Nothing is written "
        "but FILE.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="folder of a Hugging Face causal language model")
    parser.add_argument("config", metavar="CONFIG", type=path, help="YAML file of a run, such as RUN/config.yaml")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="show the first N answers to each set")
    parser.add_argument(
        "--samples", type=path, metavar="FILE", help="new JSONL file for all answers with their rewards"
    )
    return parser


class _Bar:
    """Shows on stderr how many prompts are answered: a bar on a terminal, else a line every some seconds."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0")
        columns = (TextColumn("answered"), MofNCompleteColumn(), BarColumn(bar_width=24), TimeElapsedColumn())
        self.bar = Progress(
            *columns, TextColumn("left"), TimeRemainingColumn(), console=self.console,
            disable=not self.console.is_terminal,
        )  # fmt: skip
        self.task = self.bar.add_task("answered", total=None)
        self.next_line = 0.0

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(self, done: int, total: int) -> None:
        self.bar.start()  # not before the models are loaded
        self.bar.update(self.task, completed=done, total=total)
        now = time.monotonic()
        if not self.console.is_terminal and (now >= self.next_line or done == total):
            self.console.print(f"answered {done} of {total} prompts", highlight=False)
            self.next_line = now + _SECONDS_BETWEEN_LINES


def _write(answers: list[dict[str, Any]], file: Path) -> None:
    file.write_text("".join(json.dumps(x, ensure_ascii=False) + "\n" for x in answers), "utf-8")


def _show(answers: list[dict[str, Any]], number: int) -> None:
    for name in dict.fromkeys(answer["set"] for answer in answers) if number > 0 else ():
        table = Table("prompt", "answer", "reward", title=escape(name) or None, show_lines=True)
        for answer in [answer for answer in answers if answer["set"] == name][:number]:
            reward = "none" if answer["reward"] is None else f"{answer['reward']:g}"
            table.add_row(*(escape(printable(answer[key])) for key in ("prompt", "completion")), reward)
        Console(stderr=True).print(table)
