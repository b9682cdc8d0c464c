"""Fixtures of a run's tests."""

from tests.trainer.conftest import without_curves as without_curves
