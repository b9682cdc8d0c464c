"""Keys and values that requests need not compute: of earlier turns of their episodes, and of what all begin with."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from rlft_fast.models import RowStates
from rlft_fast.rollout.types import Request

_LEAST_SAVED = 64  # tokens, for which a pass of its own is worth while


class Beginning(NamedTuple):
    """The first tokens of a request, and their keys and values."""

    token_ids: list[int]
    states: RowStates
    images: tuple[str, ...] = ()
    """Keys of the images that some of the tokens stand for."""


class KeptBeginnings:
    """Keys and values of the last turns of episodes, and of a beginning that requests of one call have in common.

    Args:
        most: episodes of which they are kept; the turns of others run again.

    Attributes:
        common: what requests begin with that no turn is kept for; None: nothing.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.common: Beginning | None = None
        self._by_episode: dict[int, Beginning] = {}

    @property
    def room(self) -> int:
        """Episodes that may be added."""
        return self.most - len(self._by_episode)

    def keep_only(self, episodes: Collection[int | None]) -> None:
        """Drops all other episodes, and what the requests of the last call had in common."""
        self.common = None
        self._by_episode = {episode: turn for episode, turn in self._by_episode.items() if episode in episodes}

    def add(self, request: Request, token_ids: Sequence[int], states: RowStates) -> None:
        """Keeps a turn.

        Args:
            request: that was answered.
            token_ids: of the answer, but for the last.
            states: keys and values of the tokens of the request and of these tokens.
        """
        assert request.episode is not None
        self._by_episode[request.episode] = Beginning([*request.token_ids, *token_ids], states, request.image_keys)

    def num_known(self, request: Request) -> int:
        """How many of a request's first tokens need not run. The last always runs."""
        return max(self._num_said(request), _num_begun(self.common, request))

    def take(self, requests: Sequence[Request]) -> RowStates | None:
        """Takes the turns of these requests out, and returns keys and values of as many tokens as `num_known` of any.

        Args:
            requests: with equal tokens.
        """
        best = max(requests, key=self._num_said)
        said, turn = self._num_said(best), self._turn(best)
        for request in requests:
            if request.episode is not None:
                self._by_episode.pop(request.episode, None)
        found = turn if said >= _num_begun(self.common, best) else self.common
        return None if found is None else found.states

    def new_beginning(self, requests: Sequence[Request]) -> list[int]:
        """What all requests begin with that no turn is kept for, where running it once saves tokens; else nothing.

        Args:
            requests: with different tokens. Equal tokens of images do not make equal images.
        """
        new = [request for request in requests if not self._num_said(request)]
        if len(new) < 2 or any(request.images is not None for request in new):
            return []
        prompts = [[*request.token_ids[:-1]] for request in new]
        first = min(prompts)
        size = _num_equal(first, max(prompts))
        return first[:size] if size * (len(new) - 1) >= _LEAST_SAVED else []

    def _num_said(self, request: Request) -> int:
        return _num_begun(self._turn(request), request)

    def _turn(self, request: Request) -> Beginning | None:
        return None if request.episode is None else self._by_episode.get(request.episode)


def _num_begun(beginning: Beginning | None, request: Request) -> int:
    """Tokens of a beginning that a request begins with, but for the request's last; 0 where images differ."""
    if beginning is None or request.image_keys[: len(beginning.images)] != beginning.images:
        return 0
    return _num_equal(beginning.token_ids, request.token_ids[:-1])


def _num_equal(x: Sequence[int], y: Sequence[int]) -> int:
    """Tokens before the first difference."""
    length = min(len(x), len(y))
    if x[:length] == y[:length]:
        return length
    return next(i for i in range(length) if x[i] != y[i])
