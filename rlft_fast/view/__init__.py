"""A page about a run: curves, steps, samples, and numbers of every token, in one file without a server."""

from rlft_fast.view.page import write_view

__all__ = ["write_view"]
