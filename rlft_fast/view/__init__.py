"""Looking at a run.

page   curves, steps, samples, and numbers of every token, in one file without a server
watch  a run in the terminal, as it goes on
"""

from typing import TYPE_CHECKING

from rlft_fast.errors import names_on_first_use

if TYPE_CHECKING:
    from rlft_fast.view.page import write_view
    from rlft_fast.view.watch import watch_run

__all__ = ["watch_run", "write_view"]

__getattr__ = names_on_first_use(__name__)
