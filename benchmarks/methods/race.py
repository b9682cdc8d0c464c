"""`python -m benchmarks.methods.race`: each method learns the demo's sums from its own example; writes docs/methods.*.

Every run is a process of its own, `rlft-fast train examples/<name>.yaml --seed <seed>`, and writes to runs/methods. The
settings, the log and the versions of a complete run are kept in a folder of benchmarks/results/methods. The same
command continues from there after an interruption, on the same machine or from a clone. The section of docs/methods.md
and its curves come from these folders alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.methods.report import Result, write_report
from benchmarks.support.document import versions
from benchmarks.support.harness import environment
from rlft_fast.config import Config, ConfigError
from rlft_fast.run import dotted

_ROOT = Path(__file__).parents[2]
RUNS = Path("runs/methods")  # relative to the repository, like all paths of the examples
RESULTS = Path("benchmarks/results/methods")
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Method:
    """A method with its example.

    Attributes:
        title: what the report calls it.
        differs: what its example changes against GRPO's.
        reward: what its rewards are, and with it their scale.
    """

    title: str
    differs: str
    reward: str = "right answers"


METHODS = {
    "grpo_sums": Method("GRPO", ""),
    "rloo": Method("RLOO", "leave-one-out baseline; KL (k1) in the reward; equal groups stay"),
    "reinforce_plus_plus": Method(
        "REINFORCE++", "no groups: returns whitened over the batch; KL (k1) in the reward; equal groups stay"
    ),
    "reinforce_plus_plus_baseline": Method(
        "REINFORCE++-baseline", "group baseline, whitened over the batch; KL (k2) in the loss; equal groups stay"
    ),
    "gspo": Method("GSPO", "one ratio per sequence, with its own bounds; mean over sequences; equal groups stay"),
    "ppo_reward_model": Method(
        "PPO",
        "a critic (GAE); a reward model beside the rule; 16 steps of 64 answers, not 28 of 128; half the entropy bonus",
        reward="right answers + reward model",
    ),
}


@dataclass(frozen=True)
class Run:
    """One method with one seed."""

    name: str
    seed: int

    @property
    def folder(self) -> Path:
        return RUNS / f"{self.name}-seed{self.seed}"

    @property
    def kept(self) -> Path:
        """Folder with the settings, the log and the versions of the complete run."""
        return RESULTS / self.folder.name

    @property
    def example(self) -> Path:
        return Path("examples") / f"{self.name}.yaml"

    @property
    def overrides(self) -> dict[str, str]:
        """All results stand beside each other, so that every machine computes them in the same dtype."""
        models = {"actor", "critic"} & yaml.safe_load((_ROOT / self.example).read_text()).keys()
        dtypes = {f"{model}.compute_dtype": "float32" for model in sorted(models)}
        return {"seed": str(self.seed), "output_dir": str(self.folder)} | dtypes

    def is_complete(self) -> bool:
        """Whether the run is kept, with its example's current settings."""
        if not (_ROOT / self.kept).is_dir():
            return False
        try:
            made = Config.load(_ROOT / self.kept / "config.yaml")
        except ConfigError:  # of an older version
            return False
        example = Config.load(_ROOT / self.example, self.overrides)
        before, now = (dict(dotted(yaml.safe_load(_portable(config)))) for config in (made, example))
        undecided = {key for key, value in now.items() if value == "auto"}  # a run writes down what its machine decided
        return now | {key: before.get(key) for key in undecided} == before

    def make(self, threads: int) -> None:
        """Runs it, unless it is complete. Afterwards its weights are deleted: they are large.

        Raises:
            subprocess.CalledProcessError: it failed; the file beside its folder, with the suffix .txt, says why.
        """
        if self.is_complete():
            return
        folder = _ROOT / self.folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        log = folder.with_name(f"{folder.name}.txt")  # a run refuses a folder that holds another file
        options = [text for key, value in self.overrides.items() for text in (f"--{key}", value)]
        facts = environment() | versions()
        print(f"{self.folder}: started", flush=True)
        with open(log, "w") as output:
            subprocess.run(
                [sys.executable, "-m", "rlft_fast", "train", str(self.example), *options], cwd=_ROOT, check=True,
                stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            )  # fmt: skip
        log.rename(folder / "output.txt")
        print(f"{self.folder}: {(folder / 'summary.json').read_text()}", flush=True)
        for name in ("checkpoints", "hf"):
            shutil.rmtree(folder / name)
        self._keep(facts | {"threads": str(threads)})

    def _keep(self, facts: dict[str, str]) -> None:
        kept = _ROOT / self.kept
        part = kept.with_name(f"{kept.name}.part")  # until it is whole
        for each in (part, kept):
            shutil.rmtree(each, ignore_errors=True)
        part.mkdir(parents=True)
        (part / "config.yaml").write_text(_portable(Config.load(_ROOT / self.folder / "config.yaml")))
        shutil.copy(_ROOT / self.folder / "metrics.jsonl", part)
        (part / "environment.json").write_text(json.dumps(facts, indent=1) + "\n")
        part.rename(kept)


def _portable(config: Config) -> str:
    """Settings as YAML, with paths that are right in every clone: relative to the repository, or from ``~`` on."""
    return config.to_yaml().replace(f"{_ROOT}/", "").replace(str(Path.home()), "~")


def all_runs(names: list[str]) -> list[Run]:
    """The runs of the methods: first one run of each method, then the further seeds."""
    return [Run(name, seed) for seed in SEEDS for name in names]


def results() -> list[Result]:
    """The results of the complete runs, in the order of METHODS."""
    return [
        Result.read(_ROOT / run.kept, METHODS[name].title, METHODS[name].differs, METHODS[name].reward, run.seed)
        for name in METHODS
        for run in all_runs([name])
        if run.is_complete()
    ]


def prepare(names: list[str]) -> None:
    """Makes the policy, the problems and the reward model that the examples need; existing models are kept.

    The reward model starts from the demo's policy and learns from the demo's answers.
    """
    from rlft_fast.demo import smollm2_folder, write_problems
    from rlft_fast.trainer import claim

    smollm2_folder()
    demo = _ROOT / "runs" / "demo"
    if not (demo / "data").is_dir():
        claim(demo)  # the demo refuses files in a folder that no run has claimed
    write_problems(demo / "data")
    models = {Config.load(_ROOT / "examples" / f"{name}.yaml").reward.model for name in names} - {None}
    if any(not (_ROOT / str(model) / "config.json").is_file() for model in models):
        if not (demo / "hf").is_dir():
            subprocess.run([sys.executable, "-m", "rlft_fast", "demo", "--rollout", "hf"], cwd=_ROOT, check=True)
        subprocess.run([sys.executable, "examples/reward_model.py"], cwd=_ROOT, check=True)
        reward = ["reward", "examples/reward_model.yaml"]
        subprocess.run([sys.executable, "-m", "rlft_fast", *reward], cwd=_ROOT, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS], help="which to run (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; each takes 4 GB and more (default: 1)")
    parser.add_argument("--report-only", action="store_true", help="run nothing; write the report of what is complete")
    options = parser.parse_args()
    if not options.report_only:
        prepare(options.methods)
        threads = max(1, len(os.sched_getaffinity(0)) // options.jobs)
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(lambda run: run.make(threads), all_runs(options.methods)))
    write_report(results(), _ROOT / "docs")


if __name__ == "__main__":
    main()
