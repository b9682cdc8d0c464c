"""``python -m rlft_fast`` is ``rlft-fast``; ``torchrun -m rlft_fast train ...`` starts several processes."""

import sys

from rlft_fast.cli import main

sys.exit(main())
