"""Container files and the workflow of a release, beside the Makefile and pyproject.toml whose words they use."""

import json
import re
import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import rlft_fast

ROOT = Path(__file__).parents[2]
CONTAINER, WORKFLOW = "docker/wheel.Dockerfile", ".github/workflows/release.yml"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_no_page_or_message_installs_from_an_index():
    """No index has rlft_fast or rlft_fast-cuda: extras are installed from the source folder, kernels from a wheel."""
    files = [
        path
        for pattern in ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "examples/*", "rlft_fast/**/*.py")
        for path in ROOT.glob(pattern)
    ]
    assert len(files) > 200
    from_index = re.compile(r"[ '\"]rlft_fast\[|pip install rlft.fast")
    assert not [path for path in files if path.is_file() and from_index.search(path.read_text("utf-8"))]


def test_the_guide_lists_every_extra():
    table = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "install.md").read_text(), re.MULTILINE)
    assert sorted(table) == sorted(PROJECT["project"]["optional-dependencies"])


def test_the_citation_names_this_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == rlft_fast.__version__


def test_the_container_has_the_images_of_the_workflow():
    images = re.findall(r"\S+/manylinux\w+-builder:\S+|\S+/manylinux_\w+x86_64", (ROOT / CONTAINER).read_text())
    assert len(images) == 2
    assert all(image.rpartition("=")[2] in (ROOT / WORKFLOW).read_text() for image in images)


@pytest.mark.parametrize("path", [CONTAINER, WORKFLOW])
def test_it_builds_for_each_python_with_the_oldest_torch_by_the_makefile(path):
    text, makefile = (ROOT / path).read_text(), (ROOT / "Makefile").read_text()
    project = PROJECT["project"]
    targets = set(re.findall(r"(?:RUN|run:) make (\w+)", text))
    assert "wheel" in {target.removesuffix("s") for target in targets}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    for name in set(re.findall(r"\b(PYTHONS?|TORCH|TORCH_INDEX)[=:]", text)):
        assert re.search(rf"^{name} +\?=", makefile, re.MULTILINE), f"{name} is no variable of the Makefile"
    classifiers = {name.rpartition(" ")[2] for name in project["classifiers"] if re.search(r"Python :: 3\.\d", name)}
    assert {f"3.{minor}" for minor in re.findall(r"cp3(\d+)-", text)} == classifiers
    (oldest,) = (need for need in project["dependencies"] if need.startswith("torch>="))
    assert re.findall(r"torch==([\d.]+)", text) == [f"{oldest.removeprefix('torch>=')}.0"]


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_container_installs_what_the_package_has(name):
    text = (ROOT / f"docker/{name}.Dockerfile").read_text()
    (extras,) = re.findall(r"^ARG EXTRAS=(.+)$", text, re.MULTILINE)
    offered = PROJECT["project"]["optional-dependencies"].keys()
    assert {"train", "ray", "servers"} < set(extras.split(",")) < offered
    (program,) = re.findall(r'^ENTRYPOINT \["(.+)"\]$', text, re.MULTILINE)
    assert program in PROJECT["project"]["scripts"]
    build = {re.split(r"\W", need)[0] for need in PROJECT["build-system"]["requires"]} - {"torch"}
    (installed,) = (line for line in text.splitlines() if "setuptools" in line)
    assert all(need in installed for need in build)  # pip installs the package without build isolation


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_container_has_the_tested_versions_and_does_not_run_as_root(name):
    lines = (ROOT / f"docker/{name}.Dockerfile").read_text().splitlines()
    (copied,) = (i for i, line in enumerate(lines) if line.startswith("COPY constraints.txt "))
    (constrained,) = (i for i, line in enumerate(lines) if line.startswith("ENV PIP_CONSTRAINT="))
    (installed,) = (i for i, line in enumerate(lines) if "/rlft_fast[$EXTRAS]" in line)
    assert copied < constrained < installed
    (user,) = (line.split()[1] for line in lines if line.startswith("USER "))
    assert user not in ("root", "0")
    assert any(f"useradd --create-home {user}" in line for line in lines)


def test_a_container_gets_every_file():
    left_out = ["git", "ls-files", "--cached", "--ignored", "--exclude-from=.dockerignore"]
    assert subprocess.check_output(left_out, cwd=ROOT, text=True) == ""


def test_the_sites_of_all_versions_stand_side_by_side(tmp_path):
    publish = runpy.run_path(str(ROOT / "docs/publish.py"))["publish"]
    site, folder = tmp_path / "site", tmp_path / "pages"
    site.mkdir()
    with pytest.raises(ValueError, match=r"no index.html: build the site with make docs"):
        publish(site, folder, "0.9.0")
    for version in ("0.9.0", "0.10.0", "0.9.1", "0.9.0"):
        (site / "index.html").write_text(f"page of {version}")
        publish(site, folder, version)
    versions = json.loads((folder / "versions.json").read_text())
    assert [(each["version"], each["aliases"]) for each in versions] == [
        ("0.10.0", ["latest"]), ("0.9.1", []), ("0.9.0", [])
    ]  # fmt: skip
    assert [(folder / v / "index.html").read_text() for v in ("0.10.0", "0.9.0")] == ["page of 0.10.0", "page of 0.9.0"]
    assert "url=0.10.0/" in (folder / "index.html").read_text()
    with pytest.raises(ValueError, match="expected numbers with points between them"):
        publish(site, folder, "../0.9.0")
