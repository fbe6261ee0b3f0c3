"""The workflow that builds the wheels of a release: its Pythons are those that the package names, its files exist."""

import os
import re
import subprocess
import tomllib

import pytest
import yaml

import fairseq_deep
from tests.helpers.paths import ROOT

WORKFLOW = ROOT / ".github/workflows/wheels.yml"


@pytest.fixture(scope="module")
def jobs():
    if not WORKFLOW.exists():
        pytest.skip("a source distribution has no workflows")
    return yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]


def toml(path):
    return tomllib.loads((ROOT / path).read_text(encoding="utf-8"))


def pythons():
    """The releases in the classifiers of the package."""
    found = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line)
             for line in toml("pyproject.toml")["project"]["classifiers"]]  # fmt: skip
    return [match[1] for match in found if match]


def test_every_supported_python_is_built_and_the_ends_are_checked(jobs):
    settings = toml("third_party/fairseq/pyproject.toml")["tool"]["cibuildwheel"]
    assert settings["build"] == [f"cp{release.replace('.', '')}-*" for release in pythons()]
    assert jobs["check"]["strategy"]["matrix"]["python"] == [pythons()[0], pythons()[-1]]
    systems = jobs["fairseq"]["strategy"]["matrix"]["os"]
    assert jobs["check"]["strategy"]["matrix"]["os"] == systems
    assert [name.split("-")[0] for name in systems] == ["ubuntu", "ubuntu", "macos", "windows"]


def test_the_extra_takes_no_fairseq_but_ours():
    text = (ROOT / "third_party/fairseq/patches/1-present-releases.patch").read_text(encoding="utf-8")
    build = re.search(r"write_version_py\(\) \+ \"(\+deep\d+)\"", text)[1]
    assert f"fairseq==0.12.2{build}" in toml("pyproject.toml")["project"]["optional-dependencies"]["train"]


@pytest.mark.parametrize("tag, status", [(f"v{fairseq_deep.__version__}", 0), ("v9.9.9", 1)])
def test_the_tag_must_be_the_version(jobs, tag, status, tmp_path):
    (tmp_path / "dist").mkdir()
    (tmp_path / f"dist/fairseq_deep-{fairseq_deep.__version__}-py3-none-any.whl").touch()
    (tmp_path / "CHANGELOG.md").write_text((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), encoding="utf-8")
    command = next(step["run"] for step in jobs["package"]["steps"] if step.get("name") == "The tag is the version")
    done = subprocess.run(["bash", "-ec", command], cwd=tmp_path, env={**os.environ, "GITHUB_REF_NAME": tag},
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == status
    assert ("::error::tag v9.9.9 differs" in done.stdout) == bool(status)
