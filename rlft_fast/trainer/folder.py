"""The folder of a run: whose it is, and what a run that resumes has to have in common with it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlft_fast.config import Config, ConfigError
from rlft_fast.files import TEMPORARY, write_text
from rlft_fast.trainer.lock import NAME as LOCK

MARKER = "run.json"
_WRITTEN = (MARKER, "config.yaml", "metrics.jsonl", "samples.jsonl", "summary.json", "curve.png", "checkpoints", "hf")


def require_usable(config: Config, *, config_path: str | Path | None = None, resume: bool = False) -> None:
    """Refuses a run that would write over what it reads, or over what no run has written. Writes nothing.

    Args:
        config: of the run.
        config_path: the file that the configuration was read from.
        resume: whether the run continues; then its own ``config.yaml`` may be that file.

    Raises:
        ValueError: naming the setting and both paths, or what the folder holds.
    """
    output = Path(config.output_dir)
    models = {"model": config.model, "reward.model": config.reward.model}
    if config.critic is not None:
        models["critic.model"] = config.critic.model
    for name, path in models.items():
        if path is not None and _place(path, output) is not None:
            raise ValueError(
                f"{name} {path} lies in output_dir {output}, where the run writes its own model: name another "
                "output_dir, or move the model"
            )
    files = {"data.path": config.data.path, "the configuration": config_path}
    if config.evaluation is not None:
        files["evaluation.path"] = config.evaluation.path
    for name, path in files.items():
        is_own = resume and name == "the configuration" and is_run(output)
        if path is not None and not is_own and _place(path, output) in _WRITTEN:
            raise ValueError(
                f"{name} {path} is where the run writes a file of its own: name another output_dir, or move the file"
            )
    require_claimable(output)


def _place(path: str | Path, output: Path) -> str | None:
    """The name in the folder under which a path lies; "" for the folder itself, None outside of it."""
    resolved, folder = Path(path).resolve(), output.resolve()
    if not resolved.is_relative_to(folder):
        return None
    return next(iter(resolved.relative_to(folder).parts), "")


def require_claimable(output: Path) -> None:
    """Raises ValueError for a folder with files in it that is not a run's."""
    own = (LOCK, MARKER + TEMPORARY)
    names = sorted(path.name for path in output.iterdir() if path.name not in own) if output.is_dir() else []
    if names and not is_run(output):
        shown = ", ".join(names[:3]) + (" and more" if len(names) > 3 else "")
        raise ValueError(f"output_dir {output} is not the folder of a run, and holds {shown}: name another folder")


def is_run(output: Path) -> bool:
    """Whether a run has written the folder: its `MARKER` tells, or, as before there was one, its configuration and log.

    Other programs also write files of these names.
    """
    return _identity(output) is not None or ((output / "metrics.jsonl").is_file() and _has_config(output))


def _identity(output: Path) -> Any:
    """What `claim` has noted of the run; None if the folder has no `MARKER` of ours."""
    try:
        return json.loads((output / MARKER).read_text())["identity"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None


def _has_config(output: Path) -> bool:
    try:
        Config.load(output / "config.yaml")
    except ConfigError:
        return False
    return True


def claim(output: Path, identity: Mapping[str, Any] | None = None) -> None:
    """Makes the folder a run's.

    Args:
        output: the folder, which may be missing.
        identity: what tells the run from others, see `require_same`.

    Raises:
        ValueError: it is not a run's, and not empty.
    """
    require_claimable(output)
    output.mkdir(parents=True, exist_ok=True)
    temporary = output / (MARKER + TEMPORARY)  # half a marker would make the folder nobody's
    write_text(temporary, json.dumps({"identity": identity or {}}, indent=2, ensure_ascii=False) + "\n")
    temporary.replace(output / MARKER)


def require_same(output: Path, identity: Mapping[str, Any]) -> None:
    """Raises ValueError, with the differences, if the run in the folder is another one than this.

    Args:
        output: the folder; nothing is known of a run that wrote no `MARKER`.
        identity: nested settings, which JSON can hold.
    """
    found = _identity(output)
    before, now = (dict(flat(settings)) if isinstance(settings, Mapping) else {} for settings in (found, identity))
    different = [name for name in now if name in before and before[name] != now[name]]
    if different:
        shown = "; ".join(f"{name} was {before[name]!r} and is {now[name]!r}" for name in different)
        raise ValueError(
            f"the run in {output} is another one than this, which cannot continue it: {shown}. Use its settings, name "
            "another output_dir, or continue it all the same with --force"
        )


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of nested settings."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
