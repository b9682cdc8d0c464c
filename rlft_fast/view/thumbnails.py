"""Small copies of the images that the samples of a run name, for its page."""

import base64
import io
from collections.abc import Iterable
from pathlib import Path

from rlft_fast.config import Config, ConfigError, load_config

_SIDE = 96  # pixels
_MOST = 1000  # images; a page loads them all
_MOST_BYTES = 64 * 2**20  # of a file


def thumbnails(run: Path, names: Iterable[str], notes: list[str]) -> dict[str, str]:
    """JPEG files as base64, by the names of their images.

    Only images in the folders of the run's data are read: a run's files may come from others.

    Args:
        run: folder of the run.
        names: paths, as in the data.
        notes: gets a sentence about images that are not shown.
    """
    wanted = sorted({*names})
    if not wanted:
        return {}
    folders, found = _data_folders(run), {}
    for name in wanted[:_MOST]:
        files = (path for folder in folders if (path := _inside(folder, name)) is not None)
        if (file := next(files, None)) is not None and (small := _small(file)) is not None:
            found[name] = small
    if missing := len(wanted) - len(found):
        notes.append(f"{missing} of {len(wanted)} images are shown by their names: no folder of the data has them.")
    return found


def _data_folders(run: Path) -> list[Path]:
    try:
        config = load_config(run / "config.yaml")
    except ConfigError:
        return []
    sources = [Path(source) for source in config.data.sets.values()] if isinstance(config, Config) else []
    return [source if source.is_dir() else source.parent for source in sources]


def _inside(folder: Path, name: str) -> Path | None:
    """The file of this name, if it is inside the folder."""
    try:
        path = (folder / name).resolve()
        is_small = path.is_file() and path.stat().st_size <= _MOST_BYTES
        return path if is_small and path.is_relative_to(folder.resolve()) else None
    except (OSError, ValueError):  # of a path with a zero byte
        return None


def _small(file: Path) -> str | None:
    from rlft_fast.trainer.prompts import read_picture  # imports transformers, which most pages do not need

    try:
        picture = read_picture(file.name, file.read_bytes())
    except (OSError, ValueError):
        return None
    picture.thumbnail((_SIDE, _SIDE))
    content = io.BytesIO()
    picture.save(content, "jpeg", quality=80)
    return base64.b64encode(content.getvalue()).decode()
