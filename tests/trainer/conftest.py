"""Fixtures of the trainer's tests."""

from collections.abc import Iterator

import pytest

from tests.support.curves import without_matplotlib


@pytest.fixture(autouse=True)
def without_curves() -> Iterator[None]:
    """Runs draw no curve. A module whose tests draw defines this fixture anew."""
    with without_matplotlib():
        yield
