"""``rlft-fast export RUN``: the newest complete checkpoint as a folder that transformers and vLLM load."""

import argparse
from pathlib import Path


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rlft-fast export", description="Write a run's newest complete checkpoint as a Hugging Face folder."
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="output_dir of a training run")
    parser.add_argument("--output", metavar="DIR", type=Path, help="folder to write (default: RUN/hf)")
    options = parser.parse_args(arguments)
    if not options.run.is_dir():
        raise ValueError(f"there is no run in {options.run}: give the output_dir of a training run")
    from rlft_fast.engine.checkpoint import export_run

    output = options.output or options.run / "hf"
    export_run(options.run, output)
    print(output)
    return 0
