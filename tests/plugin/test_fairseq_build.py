"""The backend that builds fairseq: edits are counted, the sdist is checked, and every failure is one line."""

import hashlib
import importlib
import io
import os
import sys
import sysconfig
import tarfile
from collections import namedtuple

import pytest

from tests.helpers.paths import ROOT, importable

THIRD_PARTY = ROOT / "third_party/fairseq"


@pytest.fixture(scope="module")
def modules():
    with importable(THIRD_PARTY):
        yield importlib.import_module("backend"), importlib.import_module("edits")


@pytest.fixture
def backend(modules, monkeypatch):
    monkeypatch.delenv("FAIRSEQ_SDIST", raising=False)
    return modules[0]


@pytest.fixture
def edits(modules):
    return modules[1]


def make_sdist(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"fairseq-0.12.2/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tree(folder, files):
    for name, text in files.items():
        (folder / name).write_text(text)
    return {name: (folder / name).read_text() for name in files}


def test_edits_replace_what_they_count(edits, tmp_path):
    tree(tmp_path, {"a.py": "x = old(1)\ny = old(2)\n", "b.py": "n: A = A()\nm: B = B()\n"})
    wanted = [
        edits.Edit("a.py", "old(", "new(", 2, "renamed"),
        edits.Edit("a.py", "new(1)", r"\1", 1, "later edits see earlier ones, and a plain text is no pattern"),
        edits.Edit("b.py", r"^(\w: (\w) = )\2\(\)$", r"\1field(\2)", 2, "factory", regex=True),
    ]
    edits.apply_edits(tmp_path, wanted)
    assert (tmp_path / "a.py").read_text() == "x = \\1\ny = new(2)\n"
    assert (tmp_path / "b.py").read_text() == "n: A = field(A)\nm: B = field(B)\n"


@pytest.mark.parametrize("count", [1, 3])
def test_edit_that_does_not_match_is_named_and_nothing_is_written(edits, tmp_path, count):
    before = tree(tmp_path, {"a.py": "one\n", "b.py": "old old\n"})
    wanted = [edits.Edit("a.py", "one", "two", 1, "fits"), edits.Edit("b.py", "old", "new", count, "the reason")]
    with pytest.raises(edits.EditError, match=rf"edit 2 \(the reason\) must match {count} times in b.py but matches 2"):
        edits.apply_edits(tmp_path, wanted)
    assert {name: (tmp_path / name).read_text() for name in before} == before


def test_edit_of_a_missing_file_is_named(edits, tmp_path):
    with pytest.raises(edits.EditError, match="edit 1: gone.py is missing"):
        edits.apply_edits(tmp_path, [edits.Edit("gone.py", "a", "b", 1, "reason")])


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


@pytest.mark.parametrize("name", ["missing.tar.gz", "."])
def test_unreadable_sdist_is_named(backend, tmp_path, monkeypatch, name):
    monkeypatch.setenv("FAIRSEQ_SDIST", str(tmp_path / name))
    with pytest.raises(SystemExit, match="cannot read FAIRSEQ_SDIST=.*: (No such file|Is a directory)"):
        backend.find_sdist(tmp_path)


def test_build_stops_at_the_edit_that_does_not_match(backend, edits, tmp_path, monkeypatch):
    first = edits.EDITS[0]
    sdist = make_sdist(tmp_path / "fairseq.tar.gz", {first.file: "nothing to edit\n"})
    monkeypatch.setenv("FAIRSEQ_SDIST", str(sdist))
    monkeypatch.setattr(backend, "SHA256", sha256(sdist))
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with pytest.raises(SystemExit, match=rf"edit 1 \(.*must match {first.count} times in {first.file} but matches 0"):
        backend.build_wheel(str(wheels))
    assert not list(wheels.iterdir())


def test_an_old_python_is_refused(backend, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    with pytest.raises(SystemExit, match="is not supported; use Python 3.11 or newer"):
        backend.check_machine()


def test_missing_compiler_and_headers_are_named(backend, tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path), "purelib": str(tmp_path)})
    monkeypatch.setattr(backend.shutil, "which", lambda name: f"/usr/bin/{name}")
    with pytest.raises(SystemExit, match="Python.h is missing; install Python's headers"):
        backend.check_machine()
    monkeypatch.setattr(backend.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"no C\+\+ compiler found; install one"):
        backend.check_machine()


@pytest.mark.parametrize(("torch_there", "needed"), [(True, "0.15"), (False, "1.50")])
def test_too_little_disk_is_named(backend, tmp_path, monkeypatch, torch_there, needed):
    if torch_there:
        (tmp_path / "torch").mkdir()
    usage = namedtuple("usage", "free")
    free = {str(tmp_path): 1e8}
    monkeypatch.setattr(backend, "check_compiler", lambda: None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    monkeypatch.setattr(backend.shutil, "disk_usage", lambda folder: usage(free.get(str(folder), 1e12)))
    with pytest.raises(SystemExit, match=rf"{tmp_path} has 0.10 GB free, but {needed} GB are needed"):
        backend.check_machine()


def test_inner_commands_do_not_see_the_outer_build(backend, monkeypatch):
    monkeypatch.setenv("_PYPROJECT_HOOKS_BUILD_BACKEND", "backend")
    monkeypatch.setenv("PEP517_BACKEND_PATH", "x")
    monkeypatch.setenv("PIP_INDEX_URL", "https://example.org/simple")
    inner = backend.clean_environment()
    assert "_PYPROJECT_HOOKS_BUILD_BACKEND" not in inner and "PEP517_BACKEND_PATH" not in inner
    assert inner["PIP_INDEX_URL"] == "https://example.org/simple" and inner["PATH"] == os.environ["PATH"]


@pytest.fixture(scope="module")
def edited(modules, tmp_path_factory):
    """The published source with the edits."""
    backend, edits = modules
    folder = tmp_path_factory.mktemp("published")
    try:
        sdist = backend.find_sdist(folder)
    except SystemExit as error:
        pytest.skip(str(error))
    source = backend.unpack(sdist, folder)
    edits.apply_edits(source)
    return source


def test_edits_fit_the_published_source(edits, edited):
    for edit in edits.EDITS:
        source = (edited / edit.file).read_text()
        compile(source, edit.file, "exec")
        assert edit.regex or edit.new in source


def test_edits_do_not_fit_twice(edits, edited):
    with pytest.raises(edits.EditError, match="edit 1 "):
        edits.apply_edits(edited)


@pytest.mark.parametrize("name", ["checkpoint_utils.py", "distributed/utils.py", "trainer.py", "hub_utils.py"])
def test_checkpoints_are_read_by_safe_load_alone(edited, name):
    assert "torch.load(" not in (edited / "fairseq" / name).read_text()
