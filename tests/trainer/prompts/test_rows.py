"""Several sets of rows: how many of each are read, and the order in which a run takes them."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlft_fast.config import Config, ConfigError, DataConfig
from rlft_fast.models import load_tokenizer
from rlft_fast.trainer.prompts import Stream, load_prompts, read_sets
from tests.support.runs.configs import MINIMAL
from tests.trainer.toy import write_rows


@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    weighted=st.booleans(), shuffle=st.booleans(), own=st.sampled_from([None, 7]),
)  # fmt: skip
def test_the_stream_is_the_same_however_it_is_cut(sizes, counts, weighted, shuffle, own):
    weights = tuple(range(1, len(sizes) + 1)) if weighted else None
    stream, start = Stream(tuple(sizes), weights, shuffle, own), 5
    whole = stream.rows(5, sum(counts), seed=3)
    assert stream.rows(5, sum(counts), seed=4 if own else 3) == whole
    for count in counts:
        assert stream.rows(start, count, seed=3) == whole[start - 5 : start - 5 + count]
        start += count


@pytest.mark.parametrize("shuffle", [True, False])
def test_weights_are_shares_and_visit_each_row_of_a_set_equally_often(shuffle):
    taken = Stream((10, 30, 60), (2.0, 1.0, 1.0), shuffle).rows(0, 1200, seed=0)  # passes of 50, 25 and 25
    assert Counter(0 if i < 10 else 1 if i < 40 else 2 for i in taken) == {0: 600, 1: 300, 2: 300}
    times = Counter(taken)
    assert [{times[i] for i in rows} for rows in (range(10), range(10, 40), range(40, 100))] == [{60}, {10}, {5}]
    assert all(8 <= sum(i < 10 for i in taken[j : j + 40]) <= 32 for j in range(0, 1200, 40))  # mixed, not in blocks


def test_the_order_of_the_files():
    assert Stream((2, 3), shuffle=False).rows(3, 6, seed=9) == [3, 4, 0, 1, 2, 3]
    assert Stream((2, 4), (1.0, 1.0), shuffle=False).rows(0, 6, seed=9) == [0, 2, 1, 3, 0, 4]


def test_limits_of_each_set_and_of_the_held_out_set(tmp_path):
    for name, size in (("a", 3), ("b", 4)):
        write_rows(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{i}"} for i in range(size)])
    path = {name: str(tmp_path / f"{name}.jsonl") for name in "ab"}

    def read(*held_out, **options) -> str:
        sets = read_sets(DataConfig(path=path, **options), *held_out)
        return " ".join(row["prompt"] for found in sets for row in found.rows)

    assert read() == "a0 a1 a2 b0 b1 b2 b3"
    assert read(max_rows=2) == "a0 a1 b0 b1"
    assert read(max_rows={"b": 1}) == "a0 a1 a2 b0"
    assert read(path["b"], max_rows=1) == "b0 b1 b2 b3"  # the limit is of the rows to learn from
    assert read(path["b"], 3) == "b0 b1 b2"


def test_prompts_of_several_sets(tmp_path, tiny_model):
    write_rows(tmp_path / "a.jsonl", [{"prompt": "a", "answer": 1}])
    write_rows(tmp_path / "b.jsonl", [{"prompt": "b", "level": 2}, {"prompt": "c", "level": 3}])
    path = {name: str(tmp_path / f"{name}.jsonl") for name in "ab"}
    config = DataConfig(path=path, weights={"b": 1, "a": 2}, chat=False, shuffle_seed=5)
    prompts = load_prompts(config, load_tokenizer(tiny_model("llama")), 8)
    assert (prompts.texts, prompts.columns) == (list("abc"), {"answer": [1, None, None], "level": [None, 2, 3]})
    assert prompts.order(0, 9, seed=0) == Stream((1, 2), (2, 1)).rows(0, 9, seed=5)
    assert prompts.order(0, 9, seed=0).count(0) == 6


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"path": {}}, r"data: path names no set: give a file, or several by name"),
        ({"path": {"a b": "x"}}, r"data: path has a set named 'a b': a name has letters, digits and underscores"),
        ({"path": {"a": "x", "b": "y"}, "weights": {"a": 1}}, "data: weights names a, expected a, b"),
        ({"path": "x", "weights": {"a": 1}}, r"data: weights names a, but path names no sets, as path: {a: a\.jsonl}"),
        ({"path": {"a": "x"}, "max_rows": {"b": 1}}, "data: max_rows names b, expected a"),
        ({"path": {"a": "x"}, "weights": {"a": 0}}, r"data\.weights\.a: Input should be greater than 0, got 0"),
        ({"path": "x", "shuffle": False, "shuffle_seed": 1}, "data: shuffle_seed is the seed of an order that shuffle"),
    ],
)
def test_settings_that_do_not_go_together(data, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        Config.parse(MINIMAL | {"reward": {"function": "m:f"}, "data": data})


# ---- prompts made of columns ----------------------------------------------------------------------------------------


def prompted(tmp_path, template: str, *rows: dict, **options) -> list[dict]:
    path = str(write_rows(tmp_path / "rows.jsonl", [*rows]))
    (found,) = read_sets(DataConfig(path=path, template=template, **options))
    return found.rows


def test_a_template_makes_the_prompt_of_the_columns(tmp_path):
    template = '{{ q }}\n{% for x in choices %}{{ "AB"[loop.index0] }}. {{ x }}\n{% endfor %}'
    row = {"q": "{{ 1 }} <b>", "choices": ["\u00e4", "2"], "prompt": "old", "answer": "7 #### A"}
    (made,) = prompted(tmp_path, template, row)
    assert made == row | {"prompt": "{{ 1 }} <b>\nA. \u00e4\nB. 2\n"}  # text of rows is no template, and not escaped
    (made,) = prompted(tmp_path, "{{ answer.split('####')[1].strip() }}, {{ prompt }}", row, prompt_column="x")
    assert made == row | {"x": "A, old"}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ a }", r"^data\.template is no Jinja template: unexpected '}'"),
        (
            "{{ b }}",
            r"rows\.jsonl: data\.template cannot be applied to row 1 .*: 'b' is undefined; its columns are \['a'\]",
        ),
        ("{{ a.__class__.__mro__ }}", r"row 0 .*: access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ 1 // (a | length - 1) }}", "row 0 .*: integer division or modulo by zero"),
    ],
)
def test_templates_that_cannot_be_applied(template, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        prompted(tmp_path, template, {"a": "x", "b": 1}, {"a": "xy"})


def test_prompts_of_a_task(tmp_path):
    (found,) = read_sets(DataConfig(task="chain_sum", task_size=2, template="{{ entry.answer }} is what?"))
    assert [row["question"] for row in found.rows] == [f"{row['entry']['answer']} is what?" for row in found.rows]
