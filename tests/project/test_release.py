"""One release: its version in all places; the Pythons, systems and fairseq of its wheels; what it is installed with.

The lists of releases with checksums agree with constraints.txt and hold all that is asked for.
"""

import re
import tomllib
from importlib.metadata import requires

import pytest
import yaml

import fairseq_deep
from tests.helpers.paths import ROOT


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


PROJECT = tomllib.loads(read("pyproject.toml"))["project"]


def test_the_version_and_its_date_are_the_same_everywhere():
    newest = re.findall(r"(?m)^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2})$", read("CHANGELOG.md"))[0]
    citation = yaml.safe_load(read("CITATION.cff"))
    assert newest == (fairseq_deep.__version__, str(citation["date-released"]))
    assert str(citation["version"]) == fairseq_deep.__version__
    assert f"expanded_assets/v{fairseq_deep.__version__}" in read("docs/install.md")


def test_every_supported_python_is_built_and_the_ends_are_checked():
    workflow = ROOT / ".github/workflows/wheels.yml"
    if not workflow.exists():
        pytest.skip("a source distribution has no workflows")
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    built, checked = (jobs[name]["strategy"]["matrix"] for name in ("fairseq", "check"))
    pythons = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    settings = tomllib.loads(read("third_party/fairseq/pyproject.toml"))["tool"]["cibuildwheel"]
    assert settings["build"] == [f"cp{release.replace('.', '')}-*" for release in pythons]
    assert checked == {"os": built["os"], "python": [pythons[0], pythons[-1]]}


def test_the_extra_takes_no_fairseq_but_ours():
    patch = read("third_party/fairseq/patches/1-present-releases.patch")
    build = re.search(r"write_version_py\(\) \+ \"(\+deep\d+)\"", patch)[1]
    assert f"fairseq==0.12.2{build}" in PROJECT["optional-dependencies"]["train"]


LOCKED = ROOT / "third_party/locked"
RELEASE = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)


def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def releases(path):
    found = {}
    for name, version in RELEASE.findall(path.read_text()):
        found.setdefault(plain(name), set()).add(version)
    return found


@pytest.mark.parametrize("name", ["build", "torch", "run"])
def test_every_release_has_a_checksum_and_is_the_tested_one(name):
    locked = releases(LOCKED / f"{name}.txt")
    for part in re.split(r"\n(?=\S)", (LOCKED / f"{name}.txt").read_text().strip()):
        assert re.fullmatch(r"[^\n]+==[^\n]+\\(\n    --hash=sha256:[0-9a-f]{64}( \\)?)+", part), part
    tested = releases(ROOT / "constraints.txt")
    shared = locked.keys() & tested.keys()
    assert shared and {key: locked[key] for key in shared} == {key: tested[key] for key in shared}


def test_what_the_packages_ask_for_is_there():
    asked = [line for name in ("fairseq", "fairseq_deep") for line in requires(name) if "extra" not in line]
    names = {plain(re.match(r"[A-Za-z0-9._-]+", line)[0]) for line in asked if 'python_version < "3.7"' not in line}
    there = {**releases(LOCKED / "run.txt"), **releases(LOCKED / "torch.txt")}
    assert "torch" in names and names - {"fairseq"} <= there.keys()
