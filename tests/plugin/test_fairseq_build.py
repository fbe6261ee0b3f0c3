"""The backend that builds fairseq: patches fit, the sdist is checked, and every failure is one line."""

import hashlib
import importlib
import io
import os
import sys
import sysconfig
import tarfile
import types

import pytest

from tests.helpers.paths import ROOT, importable

THIRD_PARTY = ROOT / "third_party/fairseq"


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.delenv("FAIRSEQ_SDIST", raising=False)
    with importable(THIRD_PARTY):
        yield importlib.import_module("backend")


def make_sdist(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"fairseq-0.12.2/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


PATCH = """Reasons

--- a/{0}
+++ b/{0}
@@ -1,2 +1,2 @@
 import os
-old
+new
"""


def test_patches_apply_in_order(backend, tmp_path):
    for number, (old, new) in enumerate((("old", "newer"), ("newer", "newest")), 1):
        (tmp_path / f"{number}.patch").write_text(PATCH.format("a.py").replace("new", new).replace("old", old))
    (tmp_path / "a.py").write_text("import os\nold\nrest\n")
    backend.apply_patches(tmp_path, tmp_path)
    assert (tmp_path / "a.py").read_text() == "import os\nnewest\nrest\n"


@pytest.mark.parametrize("text", [PATCH.format("a.py"), PATCH.format("gone.py"), "no patch"])
def test_a_patch_that_does_not_fit_is_named(backend, tmp_path, text):
    (tmp_path / "1-a.patch").write_text(text)
    (tmp_path / "a.py").write_text("import os\nother\n")
    with pytest.raises(SystemExit, match=r"fairseq build: 1-a.patch does not fit fairseq 0.12.2; restore it"):
        backend.apply_patches(tmp_path, tmp_path)
    assert (tmp_path / "a.py").read_text() == "import os\nother\n"


def test_sdist_with_the_right_sum_is_taken(backend, tmp_path, monkeypatch):
    sdist = make_sdist(tmp_path / "fairseq.tar.gz", {"setup.py": "pass\n"})
    monkeypatch.setenv("FAIRSEQ_SDIST", str(sdist))
    monkeypatch.setattr(backend, "SHA256", sha256(sdist))
    source = backend.unpack(backend.find_sdist(tmp_path), tmp_path)
    assert (source / "setup.py").read_text() == "pass\n"


def test_tampered_sdist_is_refused_before_anything_is_unpacked(backend, tmp_path, monkeypatch):
    sdist = make_sdist(tmp_path / "fairseq.tar.gz", {"setup.py": "pass\n"})
    monkeypatch.setattr(backend, "SHA256", sha256(sdist))
    monkeypatch.setattr(backend, "unpack", lambda *_: pytest.fail("unpacked"))
    make_sdist(sdist, {"setup.py": "harm\n"})
    monkeypatch.setenv("FAIRSEQ_SDIST", str(sdist))
    with pytest.raises(SystemExit) as stopped:
        backend.build_wheel(str(tmp_path))
    message = str(stopped.value)
    assert str(sdist) in message and "damaged" in message and sha256(sdist) in message and "\n" not in message


def test_what_the_build_lacks_is_named(backend, tmp_path, monkeypatch):
    for name in ("missing.tar.gz", "."):
        monkeypatch.setenv("FAIRSEQ_SDIST", str(tmp_path / name))
        with pytest.raises(SystemExit, match="cannot read FAIRSEQ_SDIST=.*: (No such file|Is a directory)"):
            backend.find_sdist(tmp_path)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path), "purelib": str(tmp_path)})
    monkeypatch.setattr(backend.shutil, "which", lambda name: f"/usr/bin/{name}")
    with pytest.raises(SystemExit, match="Python.h is missing; install Python's headers"):
        backend.check_machine()
    monkeypatch.setattr(backend.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"no C\+\+ compiler found; install one"):
        backend.check_machine()
    monkeypatch.setattr(backend, "check_compiler", lambda: None)
    free = {str(tmp_path): types.SimpleNamespace(free=1e8)}
    monkeypatch.setattr(backend.shutil, "disk_usage", lambda at: free.get(str(at), types.SimpleNamespace(free=1e12)))
    for needed in ("1.50", "0.15"):
        with pytest.raises(SystemExit, match=rf"{tmp_path} has 0.10 GB free, but {needed} GB are needed"):
            backend.check_machine()
        (tmp_path / "torch").mkdir(exist_ok=True)  # the largest package is there already
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    with pytest.raises(SystemExit, match="is not supported; use Python 3.11 or newer"):
        backend.check_machine()


def test_inner_commands_do_not_see_the_outer_build(backend, monkeypatch):
    monkeypatch.setenv("_PYPROJECT_HOOKS_BUILD_BACKEND", "backend")
    monkeypatch.setenv("PEP517_BACKEND_PATH", "x")
    monkeypatch.setenv("PIP_INDEX_URL", "https://example.org/simple")
    inner = backend.clean_environment()
    assert "_PYPROJECT_HOOKS_BUILD_BACKEND" not in inner and "PEP517_BACKEND_PATH" not in inner
    assert inner["PIP_INDEX_URL"] == "https://example.org/simple" and inner["PATH"] == os.environ["PATH"]


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    """The published source with the patches."""
    folder = tmp_path_factory.mktemp("published")
    with importable(THIRD_PARTY):
        backend = importlib.import_module("backend")
    try:
        sdist = backend.find_sdist(folder)
    except SystemExit as error:
        pytest.skip(str(error))
    source = backend.unpack(sdist, folder)
    backend.apply_patches(source)
    return source


def test_patches_fit_the_published_source(edited):
    named = {line[6:].strip() for path in THIRD_PARTY.glob("patches/*") for line in open(path) if line[:6] == "+++ b/"}
    assert len(named) > 50
    for name in named:
        compile((edited / name).read_text(), name, "exec")


@pytest.mark.parametrize("name", ["checkpoint_utils.py", "distributed/utils.py", "trainer.py", "hub_utils.py"])
def test_checkpoints_are_read_by_safe_load_alone(edited, name):
    assert "torch.load(" not in (edited / "fairseq" / name).read_text()
