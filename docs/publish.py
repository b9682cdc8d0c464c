"""`python docs/publish.py SITE FOLDER VERSION`: adds a built site to a folder with the sites of all versions.

The theme's list of versions reads FOLDER/versions.json, whose form is that of mike. mike itself builds with MkDocs, and
its fork for Zensical is in no package index.
"""

import json
import shutil
import sys
from pathlib import Path

NEWEST = "latest"
_GOES_TO = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={0}/"><a href="{0}/">{0}</a>\n'
)


def publish(site: Path, folder: Path, version: str) -> None:
    """Copies the site to FOLDER/VERSION, in place of what is there. FOLDER itself leads to the newest version.

    Args:
        site: a built site.
        folder: for the sites of all versions; created where it is missing.
        version: numbers with points between them, such as 0.1.0.

    Raises:
        ValueError: the version is not made of numbers, or the site has no page.
    """
    if not all(part.isdecimal() for part in version.split(".")):
        raise ValueError(f"the version is {version!r}, expected numbers with points between them, such as 0.1.0")
    if not (site / "index.html").is_file():
        raise ValueError(f"{site} has no index.html: build the site with make docs")
    shutil.rmtree(folder / version, ignore_errors=True)
    shutil.copytree(site, folder / version)
    listed = folder / "versions.json"
    known = {each["version"] for each in json.loads(listed.read_text())} if listed.exists() else set()
    ordered = sorted({*known, version}, key=lambda name: [*map(int, name.split("."))], reverse=True)
    aliases = [[NEWEST], *([] for _ in ordered[1:])]
    listed.write_text(
        json.dumps([{"version": v, "title": v, "aliases": a} for v, a in zip(ordered, aliases, strict=True)], indent=1)
    )
    (folder / "index.html").write_text(_GOES_TO.format(ordered[0]))
    (folder / ".nojekyll").touch()  # GitHub would leave out files that begin with an underscore


if __name__ == "__main__":
    publish(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
