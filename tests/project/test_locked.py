"""The lists of releases with checksums agree with constraints.txt and hold all that is asked for."""

import re
from importlib.metadata import requires

import pytest

from tests.helpers.paths import ROOT

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
