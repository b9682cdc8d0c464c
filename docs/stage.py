"""`python docs/stage.py FOLDER`: collects the pages of the site, with the same paths as in the repository."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
STAGED = ("docs", "examples", "benchmarks", "docker", "README.md", "CHANGELOG.md", "CONTRIBUTING.md")


def stage(folder: Path) -> None:
    """Writes the pages. Links to folders become links to a page, because a site shows no folders.

    Args:
        folder: for the pages; emptied first.
    """
    shutil.rmtree(folder, ignore_errors=True)
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *STAGED]
    names = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    paths = [Path(name) for name in names if (ROOT / name).exists()]  # a file may be deleted and not committed yet
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            (folder / path).write_text(_with_pages((ROOT / path).read_text(), path.parent))
        else:
            shutil.copy(ROOT / path, folder / path)
    for each in {parent for path in paths for parent in path.parents if parent != Path(".")}:
        if not (folder / each / "README.md").exists():
            (folder / each / _page_of(each)).write_text(_listing(folder / each, each))
    (folder / "api").mkdir()
    for package in re.findall(r"api/([\w.]+)\.md", (ROOT / "mkdocs.yml").read_text()):
        (folder / "api" / f"{package}.md").write_text(f"# rlft_fast.{package}\n\n::: rlft_fast.{package}\n")


def _with_pages(text: str, parent: Path) -> str:
    def to_page(link: re.Match[str]) -> str:
        target = link[1].rstrip("/")
        return f"]({target}/{_page_of(parent / target)})" if (ROOT / parent / target).is_dir() else link[0]

    return re.sub(r"\]\(([^)#:]+)\)", to_page, text)


def _page_of(folder: Path) -> str:
    """The page that stands for a folder. A folder beside a page of the same name would have this page's address."""
    return "files.md" if (ROOT / folder).with_suffix(".md").exists() else "README.md"


def _listing(folder: Path, own: Path) -> str:
    names = sorted(path.name for path in folder.iterdir() if path.name != "README.md")
    return f"# {own.name}\n\n" + "".join(
        f"- [{name}]({name}{f'/{_page_of(own / name)}' * (folder / name).is_dir()})\n" for name in names
    )


if __name__ == "__main__":
    stage(Path(sys.argv[1]))
