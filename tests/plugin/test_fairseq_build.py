"""The backend that builds fairseq: the sdist is checked, and every failure is one line; what the build must have."""

import hashlib
import importlib
import inspect
import sys
import sysconfig
import types

import pytest
from fairseq import checkpoint_utils, hub_utils, trainer
from fairseq.distributed import utils

from tests.helpers.hostile import archive, member
from tests.helpers.paths import ROOT

THIRD_PARTY = ROOT / "third_party/fairseq"


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.delenv("FAIRSEQ_SDIST", raising=False)
    monkeypatch.syspath_prepend(THIRD_PARTY)
    return importlib.import_module("backend")


@pytest.fixture
def sdist(backend, tmp_path, monkeypatch):
    """sdist(text): a source archive with that setup.py, named in the environment; the first one is the expected one."""

    def make(text):
        path = archive(tmp_path / "fairseq.tar.gz", member("fairseq-0.12.2/setup.py", text))
        monkeypatch.setenv("FAIRSEQ_SDIST", str(path))
        return path

    monkeypatch.setattr(backend, "SHA256", sha256(make("pass\n")))
    return make


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


@pytest.mark.parametrize("text", [PATCH.format("a.py"), PATCH.format("gone.py"), "no patch"])
def test_a_patch_that_does_not_fit_is_named(backend, tmp_path, text):
    (tmp_path / "1-a.patch").write_text(text)
    (tmp_path / "a.py").write_text("import os\nother\n")
    with pytest.raises(SystemExit, match=r"fairseq build: 1-a.patch does not fit fairseq 0.12.2; restore it"):
        backend.apply_patches(tmp_path, tmp_path)
    assert (tmp_path / "a.py").read_text() == "import os\nother\n"


def test_a_changed_archive_is_refused_before_anything_is_unpacked(backend, sdist, tmp_path, monkeypatch):
    monkeypatch.setattr(backend, "unpack", lambda *_: pytest.fail("unpacked"))
    path = sdist("harm\n")
    with pytest.raises(SystemExit) as stopped:
        backend.build_wheel(str(tmp_path))
    message = str(stopped.value)
    assert str(path) in message and "damaged" in message and sha256(path) in message and "\n" not in message


def test_what_the_build_lacks_is_named(backend, tmp_path, monkeypatch):
    def refused(words, call=backend.check_machine):
        with pytest.raises(SystemExit, match=words):
            call()

    for name in ("missing.tar.gz", "."):
        monkeypatch.setenv("FAIRSEQ_SDIST", str(tmp_path / name))
        refused("cannot read FAIRSEQ_SDIST=.*: (No such file|Is a directory)", lambda: backend.find_sdist(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path), "purelib": str(tmp_path)})
    monkeypatch.setattr(backend.shutil, "which", lambda name: f"/usr/bin/{name}")
    refused("Python.h is missing; install Python's headers")
    monkeypatch.setattr(backend.shutil, "which", lambda name: None)
    refused(r"no C\+\+ compiler found; install one")
    monkeypatch.setattr(backend, "check_compiler", lambda: None)
    free = {str(tmp_path): types.SimpleNamespace(free=1e8)}
    monkeypatch.setattr(backend.shutil, "disk_usage", lambda at: free.get(str(at), types.SimpleNamespace(free=1e12)))
    refused(rf"{tmp_path} has 0.10 GB free, but 1.50 GB are needed")
    (tmp_path / "torch").mkdir()  # the largest package is there already
    refused(rf"{tmp_path} has 0.10 GB free, but 0.15 GB are needed")
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    refused("is not supported; use Python 3.11 or newer")


@pytest.mark.parametrize("module", [checkpoint_utils, trainer, hub_utils, utils], ids=lambda module: module.__name__)
def test_only_safe_load_reads_checkpoints(module):
    assert "torch.load(" not in inspect.getsource(module)
