"""``rlft-fast eval MODEL CONFIG [--key value ...]``: a model's accuracy on the held-out prompts of a configuration."""

import json
from pathlib import Path

from rlft_fast.cli.keys import split_overrides
from rlft_fast.cli.parser import Parser
from rlft_fast.config import Config


def run(arguments: list[str]) -> int:
    rest, overrides = split_overrides(arguments)
    parser = Parser(
        prog="rlft-fast eval",
        usage="rlft-fast eval MODEL CONFIG [--key value ...]",
        description="Answer the held-out prompts of a configuration, score the answers as a run would, and print the "
        "numbers as JSON. Every key of the configuration can be an option, as for rlft-fast train. Nothing is written.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="folder of a Hugging Face causal language model")
    parser.add_argument("config", metavar="CONFIG", type=Path, help="YAML file of a run, such as RUN/config.yaml")
    options = parser.parse_args(rest)
    of_runs = {"checkpoint.best": "null"}  # it names a number that the sets of this evaluation may lack
    config = Config.load(options.config, {**of_runs, **overrides, "model": options.model})
    from rlft_fast.trainer import evaluate
    from rlft_fast.world import World, leaving_process_group

    with leaving_process_group():
        metrics = evaluate(config)
        if World.current().is_first:
            print(json.dumps(metrics))
    return 0
