"""What is said where a trainer lacks the functions that have to be replaced."""

import pytest

from rlft_fast.integrations.seams import require_function


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("no_such_trainer.models:Actor.forward", (), r"no_such_trainer \(not installed\) has no no_such_trainer"),
        ("transformers.trainer:Trainer.teach", (), r"transformers [\d.]+ has no transformers.trainer:Trainer.teach \("),
        (
            "transformers:Trainer.train",
            ("policy",),
            r"transformers [\d.]+ has a transformers:Trainer.train without the parameter policy, e",
        ),
    ],
)
def test_a_trainer_without_the_function(name, parameters, message):
    with pytest.raises(ImportError, match=f"{message}.*==9.9, or leave rlft_fast's integration out"):
        require_function(name, parameters, "9.9")


def test_a_function_that_takes_more_than_it_may():
    name = "transformers:Trainer.log_metrics"
    assert require_function(name, ("self", "split"), "9.9").__name__ == "log_metrics"
    with pytest.raises(
        ImportError,
        match=rf"transformers [\d.]+ has a {name} that takes \(self, split, metrics\), expected transformers",
    ):
        require_function(name, ("self", "split"), "9.9", and_no_others=True)
