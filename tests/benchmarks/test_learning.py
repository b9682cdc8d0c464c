"""The race to accuracy: its problems, which legs are kept, and the numbers of its report."""

import json
import math
import re
import shutil

import pytest

from benchmarks.learning.curriculum import WORK, work_to_level
from benchmarks.learning.curriculum import bars_of as curriculum_bars
from benchmarks.learning.curriculum import write_report as write_curriculum_report
from benchmarks.learning.distillation import bars_of as distillation_bars
from benchmarks.learning.distillation import write_report as write_distillation_report
from benchmarks.learning.race import SIDES, TRL_TIMES, UPDATES, Leg, all_legs, finished_legs
from benchmarks.learning.report import (
    HF,
    TRL,
    Curve,
    bars_of,
    standard_errors,
    write_report,
)
from benchmarks.learning.workload import NUM_HELD_OUT, SEEDS, SETTINGS, TASKS, WORDINGS, write_sums

FACTS = {"cpu": "a CPU", "cores": "2, AVX2", "date": "a day"}


def leg(side: str, seed: int, accuracy: list[float], seconds: float = 60.0, task: str = "sums") -> dict:
    """Two steps between evaluations."""
    step = {"seconds": seconds, "reward": 0.0, "tokens": 10, "rows": 20, "phases": {"seconds_update": seconds / 2}}
    steps = [{"step": i + 1, **step} for i in range(2 * (len(accuracy) - 1))]
    found = [(2 * i, value) for i, value in enumerate(accuracy)]
    return {
        "task": task, "side": side, "seed": seed, "settings": SETTINGS, "environment": FACTS, "steps": steps,
        "accuracy": found, "setting": "float32",
    }  # fmt: skip


def test_no_held_out_sum_is_trained_on(tmp_path):
    def numbers(path) -> list[frozenset[str]]:
        prompts = [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
        return [frozenset(re.findall(r"\d+", prompt)) for prompt in prompts]

    train, held_out = map(numbers, write_sums(tmp_path, "no model"))
    assert len(held_out) == NUM_HELD_OUT
    assert len(train) + len(held_out) == 400 * len(WORDINGS)
    assert not {*train} & {*held_out}


@pytest.mark.parametrize("task", TASKS)
def test_every_leg_gets_the_same_problems(tmp_path, tiny_model, task):
    if task == "chain_sum":
        pytest.importorskip("reasoning_gym", reason="the task's problems come from reasoning-gym")
    model = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), model)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    one, other = (TASKS[task].write(tmp_path / leg, str(model)) for leg in ("one", "other"))
    assert [path.read_text() for path in one] == [path.read_text() for path in other]


def test_a_leg_is_kept_while_its_settings_are_the_current_ones(tmp_path):
    one = Leg("sums", TRL, 0)
    assert one.read(tmp_path) is None
    found = leg(TRL, 0, [0.2, 0.4])
    (tmp_path / f"{one.name}.json").write_text(json.dumps(found))
    assert one.read(tmp_path) == json.loads(json.dumps(found))
    (tmp_path / f"{one.name}.json").write_text(json.dumps(found | {"settings": SETTINGS | {"steps": 1}}))
    assert one.read(tmp_path) is None


def test_the_legs_of_a_race():
    legs = all_legs([*TASKS], [TRL_TIMES, *SIDES, UPDATES], [*SEEDS])
    assert len(legs) == len({each.name for each in legs}) == len(TASKS) * (len(SIDES) * len(SEEDS) + 2)
    assert [each.seed for each in legs] == sorted(each.seed for each in legs)
    assert legs[0].side == TRL_TIMES


def test_a_leg_of_trl_takes_the_fastest_setting(tmp_path):
    one = Leg("sums", TRL, 7)
    with pytest.raises(FileNotFoundError, match=f"run the side {TRL_TIMES} first"):
        one._fastest_setting(tmp_path)
    times = {"settings": SETTINGS, "seconds_per_step": {"float32": 9.0, "bfloat16": 7.0, "compiled": None}}
    (tmp_path / f"sums-{TRL_TIMES}-seed{SEEDS[0]}.json").write_text(json.dumps(times))
    assert one._fastest_setting(tmp_path) == "bfloat16"


def test_a_report_takes_the_seeds_of_the_race(tmp_path):
    for side, seed in ((TRL, 9), (HF, 6), (TRL, 2), (UPDATES, 5)):
        (tmp_path / f"{Leg('sums', side, seed).name}.json").write_text(json.dumps(leg(side, seed, [0.2, 0.4])))
    assert [(each["side"], each["seed"]) for each in finished_legs(tmp_path)] == [(HF, 6), (TRL, 9)]


def test_minutes_to_a_level_are_interpolated():
    curve = Curve.of(leg(HF, 0, [0.2, 0.6, 0.9]))
    assert curve.minutes == [0, 2, 4]
    assert curve.minutes_to(0.75) == pytest.approx(3)
    assert curve.minutes_to(0.2) == 0
    assert curve.minutes_to(0.95) == math.inf


def test_standard_errors():
    ours = [Curve.of(leg(HF, seed, [0.2, value, 0.8])) for seed, value in enumerate((0.5, 0.7))]
    theirs = [Curve.of(leg(TRL, seed, [0.2, value, 0.8])) for seed, value in enumerate((0.4, 0.6))]
    # Variances 0.02, 0, 0.02, 0 with one degree of freedom each: 0.01 pooled; two legs a side.
    assert standard_errors(ours, theirs) == pytest.approx(0.1 / math.sqrt(0.01))
    assert standard_errors(ours[:1], theirs) is None


def test_the_report_adds_up(tmp_path):
    legs = [leg(TRL, 0, [0.2, 0.6, 0.9]), leg(HF, 0, [0.2, 0.6, 0.9], seconds=15.0)]
    (minutes, gradients, updates) = bars_of(legs, {"sums": {"gradients": [1e-5, 2e-4], "updates": 1e-4}})
    assert minutes.value == pytest.approx(0.25)
    assert minutes.holds
    assert (gradients.value, gradients.holds) == (2e-4, False)
    assert updates.holds
    elsewhere = leg(HF, 1, [0.9, 0.9, 0.9]) | {"environment": FACTS | {"cores": "2, AVX512"}}
    assert bars_of([*legs, leg(TRL, 1, [0.2, 0.6, 0.9]), elsewhere], {})[0].value == pytest.approx(0.25)
    assert bars_of([legs[0], elsewhere], {}) == []
    never = [legs[0], leg(HF, 0, [0.2, 0.6, 0.7])]
    assert bars_of(never, {})[0].value == math.inf
    rounded = [legs[0], legs[1] | {"setting": "bfloat16"}]
    assert (bars_of(legs, {})[0].limit, bars_of(rounded, {})[0].limit) == (0.35, 0.15)
    times = {"sums": {"seconds_per_step": {"float32": 60.0, "compiled": None}, "failures": {"compiled": "no compiler"}}}
    text = write_report(legs, times, {}, tmp_path)
    assert "learning/sums-trl-seed0.json" in text
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert ["update, s", "30.00", "7.50"] in cells
    assert ["rows", "20", "20"] in cells
    assert ["compiled", "no compiler"] in cells
    assert (tmp_path / "learning.png").stat().st_size > 1000
    assert [each["side"] for each in json.loads((tmp_path / "learning.json").read_text())["legs"]] == [TRL, HF]


def curriculum_leg(variant: str, seed: int, accuracy: list[float], sampled: int) -> dict:
    """Two steps between evaluations; every other column is 1 a step."""
    step = dict.fromkeys((*WORK, "zero_std_group_share"), 1.0) | {"sampled": sampled}
    return {
        "variant": variant, "seed": seed, "environment": FACTS | {"load": "0.1 at the start"},
        "steps": [step] * (2 * len(accuracy) - 2), "accuracy": [(2 * i, value) for i, value in enumerate(accuracy)],
    }  # fmt: skip


def test_a_curriculum_is_measured_in_work_to_the_level(tmp_path):
    """Over the seeds that both variants have."""
    legs = [
        curriculum_leg("plain", 0, [0.2, 0.6, 1.0], 100),
        curriculum_leg("plain", 1, [0.2, 0.9], 10**6),
        curriculum_leg("both", 0, [0.2, 0.7, 0.9], 50),
    ]
    assert [work_to_level(own, "sampled") for own in legs[::2]] == pytest.approx([300, 150])
    bars = {bar.name: bar.value for bar in curriculum_bars(legs)}
    assert bars["sampled tokens to 0.8, both / plain, 1 seeds"] == pytest.approx(0.5)
    assert bars["CPU s to 0.8, both / plain, 1 seeds"] == pytest.approx(1.0)
    assert "| [both, seed 0](curriculum/both-seed0.json)" in write_curriculum_report(legs, tmp_path)
    assert (tmp_path / "curriculum.png").is_file()


def distillation_leg(variant: str, seed: int, cpu: float, accuracy: list[float]) -> dict:
    """An evaluation after each step, of which each takes the same work."""
    points = [{"step": i, "seconds": 2 * cpu * i, "cpu": cpu * i, "accuracy": x} for i, x in enumerate(accuracy)]
    return {"variant": variant, "seed": seed, "environment": FACTS | {"load": "0.1 at the start"}, "points": points}


def test_distillation_is_compared_after_equal_work(tmp_path):
    """Between two evaluations of the other."""
    legs = [
        distillation_leg("rl", 0, 100, [0.2, 0.9]),
        distillation_leg("distil", 0, 15, [0.2, 0.6, 0.8]),
        distillation_leg("sft", 0, 20, [0.2, 0.4, 0.8]),
    ]
    bars = {bar.name: bar.value for bar in distillation_bars(legs)}
    assert bars["distil: share of wrong answers, 1 seeds"] == pytest.approx(0.2)
    assert bars["CPU s: distil / rl"] == pytest.approx(0.3)
    assert bars["share of wrong answers after equal CPU s: distil / sft"] == pytest.approx(0.2 / 0.4)
    assert "| [sft, seed 0](distillation/sft-seed0.json)" in write_distillation_report(legs, tmp_path)
    assert (tmp_path / "distillation.png").is_file()
