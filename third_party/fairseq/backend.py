"""PEP 517 backend: builds fairseq 0.12.2 from its source distribution, with the patches in `patches`.

The source distribution comes from pip's package index, or from the file in the environment variable FAIRSEQ_SDIST.
Errors end the build with one line that names the problem and the fix.
"""

import hashlib
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

import patch_ng

VERSION = "0.12.2"
SHA256 = "34f1b18426bf3844714534162f065ab733e049597476daa35fffb4d06a92b524"
HERE = Path(__file__).resolve().parent

PYTHON_MIN = (3, 11)
BUILD_BYTES = 200e6  # unpacked sdist, objects and wheel
INSTALLED_BYTES = 150e6  # fairseq and its small dependencies
TORCH_BYTES = 1.35e9  # torch for CPU


def get_requires_for_build_wheel(config_settings=None):
    return []


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Build the edited fairseq in `wheel_directory`, and return the file name of the wheel."""
    check_machine()
    with tempfile.TemporaryDirectory(prefix="fairseq-build-") as tmp:
        source = unpack(find_sdist(Path(tmp)), Path(tmp))
        apply_patches(source)
        for module in HERE.glob("safe_*.py"):
            shutil.copy(module, source / "fairseq")
        wheel = run_setup(source, Path(tmp) / "dist")
        shutil.copy(wheel, wheel_directory)
        return wheel.name


def build_sdist(sdist_directory, config_settings=None):
    stop("only wheels can be built: run pip wheel third_party/fairseq")


def stop(message):
    """End the build with one line (pip shows it in its error box)."""
    sys.exit(f"fairseq build: {message}")


def check_machine():
    """Check the version of Python, the compiler and the free disk space."""
    if sys.version_info[:2] < PYTHON_MIN:
        stop(f"Python {sys.version.split()[0]} is not supported; use Python 3.11 or newer")
    if sys.platform != "win32":
        check_compiler()
    check_space(tempfile.gettempdir(), BUILD_BYTES, "set TMPDIR to a larger disk")
    packages = sysconfig.get_paths()["purelib"]
    torch_there = os.path.isdir(os.path.join(packages, "torch"))
    needed = INSTALLED_BYTES + (0 if torch_there else TORCH_BYTES)
    check_space(packages, needed, "free some space, or create the environment on another disk")


def check_compiler():
    configured = os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++"
    if not any(shutil.which(name) for name in (configured.split()[0], "c++", "g++", "clang++")):
        stop("no C++ compiler found; install one (Debian/Ubuntu: apt install g++) or set CXX")
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    if not os.path.exists(header):
        stop(f"{header} is missing; install Python's headers (Debian/Ubuntu: apt install python3-dev)")


def check_space(folder, needed, cure):
    folder = Path(folder)
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        stop(f"{folder} has {free / 1e9:.2f} GB free, but {needed / 1e9:.2f} GB are needed: {cure}")


def find_sdist(tmp):
    """Return the content of the verified source distribution: FAIRSEQ_SDIST, or a download by pip."""
    named = os.environ.get("FAIRSEQ_SDIST") or str(download(tmp))
    try:
        content = Path(named).read_bytes()  # read once, since the file could change after its check
    except OSError as error:
        stop(f"cannot read FAIRSEQ_SDIST={named}: {error.strerror}")
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHA256:
        stop(f"{named} is damaged or not fairseq {VERSION}: sha256 is {digest}, expected {SHA256}")
    return content


def download(tmp):
    # With the hash in a requirements file, pip verifies the archive before it runs its code.
    wanted = tmp / "wanted.txt"
    wanted.write_text(f"fairseq=={VERSION} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation", "--no-binary", "fairseq"]
    command += ["--require-hashes", "--disable-pip-version-check", "-r", str(wanted), "-d", str(tmp / "sdist")]
    done = subprocess.run(command, env=clean_environment(), cwd=tmp, capture_output=True, text=True)
    found = list((tmp / "sdist").glob("fairseq-*.tar.gz"))
    if done.returncode == 0 and found:
        return found[0]
    output = done.stdout + done.stderr
    if "DO NOT MATCH THE HASHES" in output:
        got = [line.split()[-1] for line in output.splitlines() if line.strip().startswith("Got ")]
        stop(f"the download is damaged: sha256 is {' '.join(got)}, expected {SHA256}; try again")
    lines = output.strip().splitlines() or [f"status {done.returncode}"]
    reason = [line for line in lines if line.startswith("ERROR")] or lines
    stop(f"pip cannot download fairseq=={VERSION} ({reason[-1]}); or set FAIRSEQ_SDIST to its .tar.gz")


def clean_environment():
    """Return the environment without the variables of the outer build, which would affect an inner build."""
    drop = ("_PYPROJECT_HOOKS_", "PEP517_", "PIP_BUILD_", "PIP_REQ_TRACKER", "PIP_CONSTRAINT")
    return {name: value for name, value in os.environ.items() if not name.startswith(drop)}


def unpack(content, tmp):
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(tmp / "source")  # safe: its sha256 was verified
    return tmp / "source" / f"fairseq-{VERSION}"


def apply_patches(source, folder=HERE / "patches"):
    """Apply the patches in *folder* in the order of their names. They are exact: find_sdist verified the source."""
    for path in sorted(folder.glob("*.patch")):
        patch = patch_ng.fromfile(str(path))
        if not patch or not patch.apply(root=str(source)):
            stop(f"{path.name} does not fit fairseq {VERSION}; restore it (git checkout third_party/fairseq/patches)")


def run_setup(source, dist):
    command = [sys.executable, "setup.py", "bdist_wheel", "--dist-dir", str(dist)]
    done = subprocess.run(command, env=clean_environment(), cwd=source, capture_output=True, text=True)
    wheels = list(dist.glob("fairseq-*.whl"))
    if done.returncode or not wheels:
        print(done.stdout, done.stderr, sep="\n")
        stop("fairseq cannot be compiled: see the compiler's messages above")
    return wheels[0]
