"""What a worker raises to its driver."""

import pytest

from rlft_fast.cluster.sendable import raising_little
from rlft_fast.errors import RunError


class MuteError(Exception):
    def __str__(self):
        raise OSError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("x" * 10**8), "ValueError: xxx"),
        (MuteError(), "MuteError: (MuteError cannot be shown: str() raises OSError)"),
    ],
)
def test_an_exception_of_megabytes_is_cut_before_it_is_sent(error, said):
    with pytest.raises(RunError) as raised, raising_little():
        raise error
    assert str(raised.value).startswith(said)
    assert len(str(raised.value)) < 20_000
    assert raised.value.__suppress_context__  # Ray sends the whole traceback


def test_other_exceptions_are_sent_as_they_are():
    error = KeyError("x")
    with pytest.raises(KeyError) as raised, raising_little():
        raise error
    assert raised.value is error
