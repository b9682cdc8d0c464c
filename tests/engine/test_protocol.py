"""Results that are asked for later."""

import pytest

from rlft_fast.engine import Future, results


def failing(error: Exception) -> Future[None]:
    def wait() -> None:
        raise error

    return Future(wait)


def test_all_calls_are_waited_for_and_every_failure_is_told():
    waited = []
    futures = {
        "actor": failing(ValueError("the actor's reason")), "critic": Future(lambda: waited.append("critic")),
        "reference": failing(OSError("the reference's reason")),
    }  # fmt: skip
    with pytest.raises(ValueError, match="the actor's reason") as raised:
        results(futures)
    assert waited == ["critic"]
    assert raised.value.__notes__ == ["reference failed, too: OSError: the reference's reason"]
    assert futures["critic"].result() is None
    assert waited == ["critic"]  # a call is waited for once
    with pytest.raises(OSError, match="the reference's reason"):
        futures["reference"].result()
