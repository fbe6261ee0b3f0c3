"""`fairseq-deep wheelhouse`: what it collects installs and runs without an index; what stops it is one line."""

import email
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fairseq_deep.tools import UsageError, new_folder, wheelhouse
from tests.helpers.commands import run

RELEASE = "{}.{}".format(*sys.version_info)
OFFLINE = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": "",
           "https_proxy": "http://127.0.0.1:9", "PIP_NO_INDEX": "1", "OMP_NUM_THREADS": "1"}  # fmt: skip


def installed_as_wheel(name, folder):
    """The wheel that *name* was installed from, as far as what is installed tells: building fairseq takes a minute."""
    package = distribution(name)
    tag = email.message_from_string(package.read_text("WHEEL"))["Tag"]
    path = folder / f"{name}-{package.version}-{tag}.whl"
    record = next(file for file in package.files if file.match("*.dist-info/RECORD"))
    files = [file for file in package.files if ".." not in file.parts and file.suffix != ".pyc" and file != record]
    files = [file for file in files if file.name not in ("INSTALLER", "REQUESTED", "direct_url.json")]
    with zipfile.ZipFile(path, "w") as archive:
        for file in files:
            archive.write(file.locate(), str(file))
        archive.writestr(str(record), "".join(f"{file},,\n" for file in (*files, record)))
    return path


def asked_for(name, found, extras=()):
    """*name* with *extras*, and what that asks for here, as far as it is installed; *found* by name and extras."""
    try:
        package = distribution(name)
    except PackageNotFoundError:
        return found
    if (name, *extras) not in found:
        found[(name, *extras)] = package
        for wanted in map(Requirement, package.requires or ()):
            if not wanted.marker or any(wanted.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                asked_for(wanted.name.lower(), found, sorted(wanted.extras))
    return found


def python_with_torch(folder):
    """An interpreter with this environment's torch, what that needs, and no other package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    for package in asked_for("torch", {}).values():
        for top in {file.parts[0] for file in package.files if file.parts[0] != ".."} - {"__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(package.locate_file(top))
    return folder / "bin/python"


def alone():
    """What runs a command without a network, where that is allowed; elsewhere there is at least no index (OFFLINE)."""
    apart = ["unshare", "-rn"]
    return apart if shutil.which("unshare") and subprocess.run([*apart, "true"]).returncode == 0 else []


def install(wheels, *arguments, cwd=None, **variables):
    environment = {**os.environ, **OFFLINE, **variables}
    environment.pop("PYTHONPATH", None)
    command = [*alone(), str(wheels / "install.sh"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, cwd=cwd)


def collect(folder):
    """The folder that the command makes for this Python, without torch."""
    folder.mkdir()
    fairseq = installed_as_wheel("fairseq", folder)
    command = ["fairseq-deep", "wheelhouse", "--python", RELEASE, "--without-torch", "--fairseq", fairseq]
    done = run(*command, "--output", folder / "wheels", check=False)
    if done.returncode:
        ask = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), "setuptools"]
        if subprocess.run(ask, capture_output=True).returncode:
            pytest.skip(f"no package index: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in folder.iterdir()) == [fairseq.name, "wheels"]
    return folder / "wheels"


def test_it_installs_without_an_index_and_keeps_the_torch_that_is_there(tmp_path):
    wheels = collect(tmp_path / "index")
    names = [path.name for path in (wheels / "wheels").iterdir()]
    assert not [name for name in names if name.startswith(("torch-", "nvidia", "triton"))]
    python = python_with_torch(tmp_path / "machine")
    venv = tmp_path / "venv"
    done = install(wheels, venv, PYTHON=str(python))
    assert done.returncode == 0 and "Training works here." in done.stdout, done.stdout + done.stderr
    program = "import fairseq, fairseq_deep, sys, torch; from fairseq_deep.tools.main import main; "
    program += "print(*(module.__file__ for module in (fairseq, fairseq_deep, torch))); main(sys.argv[1:])"
    command = [venv / "bin/python", "-c", program, "archs", "transformer_dlcl_2l2l_tiny"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, **OFFLINE})
    files, *table = done.stdout.splitlines()
    places = [Path(file).relative_to(tmp_path).parts[0] for file in files.split()]
    assert places == ["venv", "venv", "machine"] and not list(venv.glob("lib/python*/site-packages/torch*/"))
    assert table[1].split()[:4] == ["transformer_dlcl_2l2l_tiny", "pre", "2/2", "tiny"]


def test_the_script_refuses_in_one_line_what_cannot_work(tmp_path):
    folder, new, bare = tmp_path / "wheelhouse", tmp_path / "venv", tmp_path / "bare"
    (folder / "wheels").mkdir(parents=True)
    tag = "cp" + RELEASE.replace(".", "")
    (folder / f"wheels/fairseq-0.12.2+deep9-{tag}-{tag}-linux_x86_64.whl").touch()
    wheelhouse.write_rest(wheelhouse.find_repository(), str(folder), RELEASE, without_torch=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)

    def refused(*arguments, python=bare / "bin/python", cwd=None):
        done = install(folder, *arguments, cwd=cwd, PYTHON=str(python))
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and not new.exists(), done.stderr
        return done.stderr

    assert "usage: " in refused()
    assert f"{tmp_path} exists" in refused(tmp_path)
    assert "has no torch, and this folder neither" in refused(new)
    other = tmp_path / "other"
    assert f"{other} is not there" in refused(new, python=other)
    other.write_text("#!/bin/sh\necho 3.4\n")
    other.chmod(0o755)
    assert f"is Python 3.4, and these wheels are for {RELEASE}" in refused(new, python=other)
    # no wheels: pip refuses them, and what was made by then goes
    for name in ("torch-2-py3-none-any.whl", "fairseq_deep-0-py3-none-any.whl"):
        (folder / "wheels" / name).touch()
    evil = folder / "wheels/fairseq_deep-9-py3-none-any.whl"
    for make in (evil.touch, lambda: evil.symlink_to("fairseq_deep-0-py3-none-any.whl")):
        (folder / "SHA256SUMS").unlink()
        wheelhouse.write_rest(wheelhouse.find_repository(), str(folder), RELEASE, without_torch=True)
        make()
        assert f"{evil} is a link or not in SHA256SUMS" in refused(new, python=sys.executable)
        evil.unlink()
    for name in ("pip", "venv"):  # a module of the directory in which the script is run
        (folder / f"{name}.py").write_text("import sys\nsys.exit('run')\n")
    assert "pip failed: ERROR: " in refused("../venv", python=sys.executable, cwd=folder)
    (folder / "README.txt").write_text("other")
    assert "missing or damaged" in refused(new)


@pytest.mark.parametrize("script, told", [
    ("echo 'fairseq build: no C++ compiler found; install one'; echo 'ERROR: failed'; exit 1", "no C++ compiler"),
    ("echo 'ERROR: [Errno 28] No space left on device'; exit 2", "No space left"),
    ("echo 'ERROR: No matching distribution found for setuptools>=77'; exit 1", "No matching distribution"),
])  # fmt: skip
def test_what_stops_pip_is_told_and_nothing_is_left(monkeypatch, tmp_path, command, script, told):
    """The environment that wheels are built in has a Python that runs *script* instead."""

    def make_venv(interpreter, folder):
        path = Path(folder, "bin/python")
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    monkeypatch.setattr(wheelhouse, "make_venv", make_venv)
    code, _, error = command("wheelhouse", "--output", tmp_path / "new")
    assert code == 2 and told in error and error.count("\n") == 1 and not list(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt), new_folder(str(tmp_path / "new")):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_the_interpreter_is_one_of_the_release_that_is_asked_for(tmp_path, monkeypatch):
    assert wheelhouse.find_python(RELEASE) == wheelhouse.find_python(sys.executable) == (sys.executable, RELEASE)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / "versions/3.99.1/bin/python"
    path.parent.mkdir(parents=True)
    with pytest.raises(UsageError, match=r"Python 3.99, .* to compile fairseq, .* apt install python3.99-dev"):
        wheelhouse.find_python("3.99")
    path.write_text("#!/bin/sh\necho 3.99\n")
    path.chmod(0o755)
    assert wheelhouse.find_python("3.99") == (str(path), "3.99")
    path.write_text("#!/bin/sh\necho 3.8\n")
    with pytest.raises(UsageError, match="Python 3.8 is not supported"):
        wheelhouse.find_python(str(path))
    for wanted in ("4", "python-that-is-not-there"):
        with pytest.raises(UsageError, match="must be a release"):
            wheelhouse.find_python(wanted)


def test_another_wheel_is_no_fairseq_of_ours_and_the_repository_is_needed(tmp_path, monkeypatch):
    tag = "cp" + RELEASE.replace(".", "")
    for name in (f"fairseq-0.12.2-{tag}-{tag}-linux_x86_64.whl", "fairseq-0.12.2+deep9-cp36-cp36m-linux_x86_64.whl"):
        with pytest.raises(UsageError, match="not our fairseq.s wheel"):
            wheelhouse.copy_fairseq(str(tmp_path / name), str(tmp_path), RELEASE)
    monkeypatch.setattr("fairseq_deep.__path__", [str(tmp_path / "fairseq_deep")])
    with pytest.raises(UsageError, match="installed without it"):
        wheelhouse.find_repository()
