"""Fast, small-memory reinforcement fine-tuning of language models."""

import sys
import warnings
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlft_fast.models import patch_lm_head, unpatch_lm_head

__all__ = ["patch_lm_head", "unpatch_lm_head"]

__version__ = "0.1.0"  # the one place; setup.py and the command line read it


def __getattr__(name: str) -> Any:
    """Imports on first use: `rlft_fast.ops` must not need transformers."""
    if name not in __all__:
        raise AttributeError(f"module 'rlft_fast' has no attribute {name!r}")
    from rlft_fast import models

    return getattr(models, name)


def _prefer_compiled() -> None:
    """Loads an installed package in place of a source tree without compiled files.

    At the repository's root, ``python -m`` and pytest find the source before the installed package.
    """
    own = Path(__file__).resolve().parent
    if any(own.glob("_C.*")):
        return
    folders = [Path(entry).resolve() / "rlft_fast" for entry in sys.path]
    compiled = next((folder for folder in folders if folder != own and any(folder.glob("_C.*"))), None)
    if compiled is None:
        return  # the ops say how to compile it
    message = f"the source in {own} is not compiled: the installed rlft_fast in {compiled} runs instead of it"
    warnings.warn(message, stacklevel=2)
    spec = spec_from_file_location(__name__, compiled / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[__name__] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[__name__])


_prefer_compiled()
