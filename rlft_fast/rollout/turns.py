"""What a generator has computed for the turns of episodes so far, for the next turn of each."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from rlft_fast.models import RowStates
from rlft_fast.rollout.types import Request


class _Turn(NamedTuple):
    token_ids: list[int]
    states: RowStates


class KeptTurns:
    """Keys and values of the last turns of episodes.

    Args:
        most: episodes of which they are kept; the turns of others run again.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._by_episode: dict[int, _Turn] = {}

    @property
    def room(self) -> int:
        """Episodes that may be added."""
        return self.most - len(self._by_episode)

    def keep_only(self, episodes: Collection[int | None]) -> None:
        """Drops all other episodes."""
        self._by_episode = {episode: turn for episode, turn in self._by_episode.items() if episode in episodes}

    def add(self, request: Request, token_ids: Sequence[int], states: RowStates) -> None:
        """Keeps a turn.

        Args:
            request: that was answered.
            token_ids: of the answer, but for the last.
            states: keys and values of the tokens of the request and of these tokens.
        """
        assert request.episode is not None
        self._by_episode[request.episode] = _Turn([*request.token_ids, *token_ids], states)

    def num_known(self, request: Request) -> int:
        """How many of a request's first tokens need not run. The last always runs."""
        turn = self._turn(request)
        return 0 if turn is None else _num_equal(turn.token_ids, request.token_ids[:-1])

    def take(self, requests: Sequence[Request]) -> RowStates | None:
        """Takes the turns of these requests out, and returns those of the request that `num_known` is largest of.

        Args:
            requests: with equal tokens.
        """
        best = max(requests, key=self.num_known)
        turn = self._turn(best)
        for request in requests:
            if request.episode is not None:
                self._by_episode.pop(request.episode, None)
        return None if turn is None else turn.states

    def _turn(self, request: Request) -> _Turn | None:
        return None if request.episode is None else self._by_episode.get(request.episode)


def _num_equal(x: Sequence[int], y: Sequence[int]) -> int:
    """Tokens before the first difference."""
    length = min(len(x), len(y))
    if x[:length] == y[:length]:
        return length
    return next(i for i in range(length) if x[i] != y[i])
