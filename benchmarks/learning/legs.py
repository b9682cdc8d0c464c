"""The legs of a race: a leg (a variant, a seed) is a process of its own, and a JSON file that is kept when it ends."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any


def leg_parser(description: str | None, variants: Collection[str]) -> argparse.ArgumentParser:
    """The options of a race: which legs it runs, or the one leg that this process is."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=variants, default=[*variants], help="(default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="(default: %(default)s)")
    parser.add_argument("--report-only", action="store_true", help="run nothing; write the report of what is finished")
    parser.add_argument("--leg", nargs=2, metavar=("VARIANT", "SEED"), help="run one leg here and print its JSON")
    return parser


def run_legs(
    module: str, folder: Path, variants: Collection[str], options: argparse.Namespace, arguments: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Runs the legs that are missing, and returns all that are finished, variant after variant.

    Args:
        module: whose ``--leg`` runs a leg, and prints its JSON as the last line.
        folder: of the files.
        variants: all of the race.
        options: of `leg_parser`.
        arguments: further arguments of a leg.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for variant in options.variants:
            path = folder / f"{variant}-seed{seed}.json"
            if not (options.report_only or path.exists()):
                command = [sys.executable, "-m", module, *arguments, "--leg", variant, str(seed)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                path.write_text(done.stdout.splitlines()[-1] + "\n")
    order = [folder / f"{variant}-seed{seed}.json" for variant in variants for seed in range(100)]
    if not (legs := [json.loads(path.read_text()) for path in order if path.exists()]):
        raise SystemExit("no leg is finished")
    return legs
