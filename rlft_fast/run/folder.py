"""The folder of a run: which run it belongs to, and which settings a resumed run must share with that run."""

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlft_fast.config import OBJECTIVES, ConfigError, RunConfig, changed_settings, load_config
from rlft_fast.engine import require_exportable
from rlft_fast.files import TEMPORARY, is_apple_double, replacing, require_no_link, write_text
from rlft_fast.plugins import MissingFunctionError
from rlft_fast.run.lock import NAME as LOCK

MARKER = "run.json"
_WRITTEN = (
    MARKER, "config.yaml", "metrics.jsonl", "samples.jsonl", "timeline.jsonl", "summary.json", "curve.png",
    "timeline.png", "view.html", "tokens", "rollouts", "profile", "reference",
    "checkpoints", "hf", "best", "tensorboard", "wandb", "mlflow", "mlflow.db",
)  # fmt: skip


_WRITTEN_INTO = ("", "checkpoints", "hf", "best", "tokens", "rollouts", "profile", "reference")  # folders
LOGS = ("metrics.jsonl", "samples.jsonl", "timeline.jsonl")
_REPLACED = (MARKER, "config.yaml", "summary.json")


def require_usable(config: RunConfig, *, config_path: str | Path | None = None, resume: bool = False) -> None:
    """Refuses a run that would overwrite its own inputs, or files that no run has written. Writes nothing.

    Args:
        config: the configuration of the run.
        config_path: the file that the configuration was read from.
        resume: whether the run continues. Then config_path may be the ``config.yaml`` that the run has written.

    Raises:
        ValueError: the run is refused. The message names the setting and both paths, files in the folder, or a folder
            in it that cannot be written.
    """
    output = Path(config.output_dir)
    try:
        str(output.absolute()).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"output_dir {output.absolute()} has a name that is not UTF-8, to which tokenizers cannot write: name "
            "another folder"
        ) from error
    for name, path in {**config.model_folders, **config.start_folders}.items():
        if path is not None and _place(path, output) is not None:
            raise ValueError(
                f"{name} {path} lies in output_dir {output}, where the run writes its own model: name another "
                "output_dir, or move the model"
            )
    for name, path in {**config.data_files, "the configuration": config_path}.items():
        is_own = resume and name == "the configuration" and is_run(output)
        if path is not None and not is_own and _place(path, output) in _WRITTEN:
            raise ValueError(
                f"{name} {path} is where the run writes a file of its own: name another output_dir, or move the file"
            )
    require_claimable(output)
    for name in _WRITTEN_INTO:
        _require_writable(output / name)
    for name in ("hf", "best"):
        require_exportable(output / name)
    for name in (*LOGS, *_REPLACED):
        if (output / name).is_dir() and not (output / name).is_symlink():
            raise ValueError(
                f"{output / name} is a folder, and the run writes a file of this name: move the folder away"
            )
    for name in LOGS:
        require_no_link(output / name)


def require_restartable(*, resume: bool | str) -> None:
    """Refuses a run that torchrun would begin again after a failure, instead of continuing it.

    Args:
        resume: see `train`.

    Raises:
        ValueError: torchrun restarts its processes, and the run does not resume, or goes back to a named checkpoint.
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")  # torchrun tells its processes
    if resume is True or restarts == "0":
        return
    again = f"would go back to {resume} again" if resume else "would not continue what it has saved"
    raise ValueError(
        f"torchrun was given --max-restarts {restarts}, and a run that is restarted {again}: start it with --resume "
        "(in Python with resume=True), which begins a run that has no checkpoint yet, and continues it after a "
        "restart; or leave --max-restarts out"
    )


def _require_writable(folder: Path) -> None:
    """Raises ValueError if something stands in the place of a folder that a run can write."""
    if folder.is_symlink() and not folder.exists():
        raise ValueError(
            f"{folder} is a link to {folder.readlink()}, which does not exist: create it, or remove the link"
        )
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is no folder, and the run writes one of this name: move the file away")
    if folder.exists() and not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise ValueError(f"{folder} cannot be written: change its permissions, or name another output_dir")


def _place(path: str | Path, output: Path) -> str | None:
    """The name of the folder's entry that contains a path; "" for the folder itself, None for a path outside of it."""
    resolved, folder = Path(path).resolve(), output.resolve()
    if not resolved.is_relative_to(folder):
        return None
    return next(iter(resolved.relative_to(folder).parts), "")


def require_claimable(output: Path) -> None:
    """Raises ValueError for a folder that holds files and is not the folder of a run."""
    own = (LOCK, MARKER + TEMPORARY)
    found = [path.name for path in output.iterdir()] if output.is_dir() else []
    names = sorted(name for name in found if name not in own and not is_apple_double(name))
    if names and not is_run(output):
        shown = ", ".join(names[:3]) + (" and more" if len(names) > 3 else "")
        raise ValueError(f"output_dir {output} is not the folder of a run, and holds {shown}: name another folder")


def is_run(output: Path) -> bool:
    """Whether a run has written the folder.

    A run writes a `MARKER`. Early versions wrote none: then a valid configuration and a log tell. Their names alone do
    not tell, because other programs write files of these names, too.
    """
    return _identity(output) is not None or ((output / "metrics.jsonl").is_file() and _has_config(output))


def _identity(output: Path) -> Any:
    """The identity that `claim` has written. None if the folder has no `MARKER` of a run."""
    return _marked(output, "identity")


def run_id(output: Path) -> str | None:
    """The id that `claim` has written. None if the folder has no `MARKER`, or a marker of an early version."""
    found = _marked(output, "id")
    return found if isinstance(found, str) and found.isalnum() else None


def _marked(output: Path, name: str) -> Any:
    try:
        return json.loads((output / MARKER).read_text(encoding="utf-8"))[name]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None


def _has_config(output: Path) -> bool:
    try:
        load_config(output / "config.yaml")
    except ConfigError:
        return False
    return True


def claim(output: Path, identity: Mapping[str, Any] | None = None, *, resume: bool = False) -> None:
    """Marks the folder as the folder of a run, and gives the run an id.

    Args:
        output: the folder, which may be missing.
        identity: settings that distinguish the run from other runs, see `require_same`.
        resume: the run keeps the id that it has.

    Raises:
        ValueError: the folder is not empty, and is not the folder of a run.
    """
    require_claimable(output)
    output.mkdir(parents=True, exist_ok=True)
    marks = {
        "id": (run_id(output) if resume else None) or secrets.token_hex(4), "folder": os.getcwd(),
        "identity": identity or {},
    }  # fmt: skip
    with replacing(output / MARKER) as file:  # with half a marker the folder would belong to no run
        write_text(file, json.dumps(marks, indent=2) + "\n")  # in ASCII: names of folders need not be UTF-8


@contextlib.contextmanager
def naming_start(output: Path) -> Iterator[None]:
    """Says of a function that is missing in what folder the run was started, if it was another one.

    Args:
        output: folder of the run.

    Raises:
        MissingFunctionError: the function is missing.
    """
    try:
        yield
    except MissingFunctionError as error:
        started = _marked(output, "folder")
        if not isinstance(started, str) or started == os.getcwd():
            raise
        raise MissingFunctionError(
            f"{error}. The run in {output} was started in {started}, where its modules and relative paths are found: "
            "start there again"
        ) from error


def settings_of(output: Path) -> Mapping[str, Any]:
    """The `fixed_settings` of the run in the folder, nested by section. Empty if the folder has no `MARKER`."""
    return _settings_in(_identity(output))


def _settings_in(identity: Any) -> Mapping[str, Any]:
    found = identity if isinstance(identity, Mapping) else {}
    settings = found.get("settings", found)  # early versions had them beside the rest
    return settings if isinstance(settings, Mapping) else {}


def require_same(output: Path, identity: Mapping[str, Any]) -> None:
    """Raises ValueError if the folder belongs to another run. The message names the settings that differ.

    Args:
        output: the folder. Without a `MARKER` nothing is known of its run, and nothing is raised.
        identity: of this run, which JSON can hold: its `fixed_settings` as ``settings``, and more that tells it from
            others, nested under names of its own.
    """
    if different := differences(_identity(output), identity):
        shown = "; ".join(f"{name} was {old!r} and is {new!r}" for name, old, new in different)
        raise ValueError(
            f"this run cannot continue the run in {output}, whose settings differ: {shown}. Use the same settings, "
            "name another output_dir, or continue anyway with --force"
        )


def differences(before: Any, identity: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """What differs between the identities of two runs, as (dotted name, value before, value now).

    Args:
        before: identity of a run, as JSON has kept it; None: nothing is known of it. Names that it lacks do not differ.
        identity: see `require_same`.
    """
    found, settings = before if isinstance(before, Mapping) else {}, _settings_in(before)
    own = OBJECTIVES[identity["settings"].get("objective", "rl")]
    different = [*changed_settings(settings, identity["settings"], own)]
    was, now = (dict(dotted({k: v for k, v in of.items() if k != "settings"})) for of in (found, identity))
    return different + [(name, was[name], now[name]) for name in now if name in was and was[name] != now[name]]


def dotted(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of nested settings."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
