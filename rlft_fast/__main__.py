"""``python -m rlft_fast`` is ``rlft-fast``; ``torchrun -m rlft_fast train ...`` starts several processes."""

from rlft_fast.cli import script

script()
