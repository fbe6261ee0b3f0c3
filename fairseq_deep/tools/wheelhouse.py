"""collect the wheels for a machine without a package index, with a script that installs them

fairseq is compiled for one release of Python, so that an interpreter of that release has to be on this machine.
"""

import argparse
import contextlib
import email
import glob
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence

import fairseq_deep
from fairseq_deep.runtime.files import sha256
from fairseq_deep.tools import UsageError, new_folder

OLDEST = (3, 10)
EXTRAS = ("plot", "train")
TORCH = "torch"
TOLD = ("Collecting ", "Processing ", "Building wheels")
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the interpreter, the folder and what goes into it."""
    parser.add_argument("--output", required=True, metavar="DIR", help="the folder to make")
    running = "{}.{}".format(*sys.version_info)
    text = "the release of Python there, or an interpreter of it here (default: %(default)s)"
    parser.add_argument("--python", default=running, metavar="3.X", help=text)
    text = "for a machine that has torch: leave it out, and keep the one there"
    parser.add_argument("--without-torch", action="store_true", help=text)
    parser.add_argument("--fairseq", metavar="WHEEL", help="take this wheel of our fairseq instead of building one")


def run(args: argparse.Namespace) -> int:
    """Make the folder, whole or not at all."""
    root = find_repository()
    if args.fairseq and not os.path.isfile(args.fairseq):
        raise UsageError(f"--fairseq {args.fairseq}: there is no such file")
    interpreter, release = find_python(args.python)
    with new_folder(args.output) as folder:
        wheels, venv = os.path.join(folder, "wheels"), os.path.join(folder, "build")
        os.mkdir(wheels)
        print(f"Python {release}: {interpreter}")
        make_venv(interpreter, venv)
        pip = Pip(os.path.join(venv, "bin", "python"), wheels, root)
        if args.fairseq:
            copy_fairseq(args.fairseq, wheels, release)
        else:
            pip.wheel("--no-deps", "./third_party/fairseq")
        pip.wheel("--no-deps", copy_package(root, os.path.join(venv, "fairseq_deep")))
        wanted = os.path.join(venv, "wanted.txt")
        with open(wanted, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in requirements(wheels, args.without_torch))
        pip.wheel("-r", wanted, "-c", "constraints.txt")
        shutil.rmtree(venv)
        write_rest(root, folder, release, args.without_torch)
        count, size = measure(wheels)
    print(f"{args.output}: {count} wheels, {size / 1e6:.0f} MB; there: ./install.sh VENV")
    return 0


def find_repository() -> str:
    """Return the root of the clone that this package is installed from, or raise `UsageError`."""
    root = os.path.dirname(os.path.abspath(fairseq_deep.__path__[0]))
    if not os.path.isfile(os.path.join(root, "third_party", "fairseq", "backend.py")):
        raise UsageError(
            "fairseq is built from the repository, and this package was installed without it; "
            "run this in a clone's environment (pip install -e . there)"
        )
    return root


def find_python(wanted: str) -> tuple[str, str]:
    """Return the path of the interpreter that *wanted* ("3.12" or a path) names, and its release.

    Raises:
        UsageError: there is none, or it is too old
    """
    named = None if re.fullmatch(r"3\.\d+", wanted) else wanted
    if named and not shutil.which(named):
        raise UsageError(f"--python {wanted}: neither a release, such as 3.12, nor an interpreter on this machine")
    for path in [named] if named else _candidates(wanted):
        release = _release(path)
        if release and (named or release == wanted):
            if tuple(map(int, release.split("."))) < OLDEST:
                raise UsageError(f"Python {release} is not supported; take 3.10 or newer")
            return shutil.which(path), release
    if named:
        raise UsageError(f"--python {wanted}: it does not run")
    raise UsageError(
        f"there is no Python {wanted} here, and fairseq has to be compiled for it; install it with its headers "
        f"(Debian/Ubuntu: apt install python{wanted}-dev python{wanted}-venv), or --python /path/to/python{wanted}"
    )


def _candidates(release: str) -> list[str]:
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    found = sorted(glob.glob(os.path.join(pyenv, "versions", f"{release}.*", "bin", "python")))
    return [path for path in (sys.executable, shutil.which(f"python{release}"), *reversed(found)) if path]


def _release(path: str) -> str:
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    with contextlib.suppress(OSError):
        done = subprocess.run([path, "-c", program], capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout.strip()
    return ""


def make_venv(interpreter: str, folder: str) -> None:
    """Make the environment in which wheels are built: its pip is that of *interpreter*."""
    done = subprocess.run([interpreter, "-m", "venv", folder], capture_output=True, text=True)
    if done.returncode:
        last = (done.stdout + done.stderr).strip().splitlines() or ["no reason given"]
        raise UsageError(f"{interpreter} -m venv failed ({last[-1]}); install Python's venv, or make room on the disk")


def copy_package(root: str, folder: str) -> str:
    """Copy what fairseq_deep is built from; in the repository itself, a build takes in what older ones have left."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(os.path.join(root, "fairseq_deep"), os.path.join(folder, "fairseq_deep"), ignore=ignored)
    for name in SOURCES:
        shutil.copy(os.path.join(root, name), folder)
    return folder


def copy_fairseq(path: str, wheels: str, release: str) -> None:
    """Copy a wheel of our fairseq; raise `UsageError` if it is none, or for another Python than *release*."""
    name = os.path.basename(path)
    tag = "cp" + release.replace(".", "")
    if not re.fullmatch(rf"fairseq-[^-]*\+deep\d+-{tag}-\w+-\w+\.whl", name):
        raise UsageError(f"--fairseq {path}: not our fairseq's wheel for Python {release} (fairseq-...+deepN-{tag}-)")
    shutil.copy(path, wheels)


class Pip:
    """``pip wheel`` of one interpreter into the folder *wheels*, run in the repository *root*, with progress.

    Which index is asked is pip's own configuration.
    """

    def __init__(self, python: str, wheels: str, root: str):
        self.command = [python, "-m", "pip", "wheel", "--disable-pip-version-check", "--progress-bar", "off"]
        self.command += ["--wheel-dir", wheels, "--find-links", wheels]
        self.root, self.start = root, time.monotonic()

    def wheel(self, *arguments: str) -> None:
        """Raise `UsageError` with pip's reason, or that of the build of fairseq, if it fails."""
        lines = []
        command, streams = [*self.command, *arguments], {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, cwd=self.root, text=True, errors="replace", **streams) as process:
            try:
                for line in process.stdout:
                    lines.append(line.strip())
                    if lines[-1].startswith(TOLD):
                        verb, _, what = lines[-1].partition(" (from")[0].partition(" ")
                        print(f"  {time.monotonic() - self.start:3.0f} s  {verb} {os.path.basename(what)}", flush=True)
            except BaseException:
                process.terminate()
                raise
        if process.returncode:
            raise UsageError(f"pip failed: {_reason(lines)}")


def _reason(lines: Sequence[str]) -> str:
    for mark in ("fairseq build: ", "No space left", "ERROR: "):
        found = [line for line in lines if mark in line]
        if found:
            return found[0]
    return lines[-1] if lines else "it says nothing"


def requirements(wheels: str, without_torch: bool) -> list[str]:
    """Return what fairseq and fairseq_deep, whose wheels are there, ask for, one requirement of pip each."""
    found = []
    for path in sorted(glob.glob(os.path.join(wheels, "*.whl"))):
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            metadata = email.message_from_bytes(archive.read(name))
        for line in metadata.get_all("Requires-Dist", []):
            package = re.match(r"[A-Za-z0-9._-]+", line)[0].lower()
            requirement, _, extra = line.partition("extra ==")
            if package == "fairseq" or (without_torch and package == TORCH):
                continue
            if not extra:
                found.append(line)
            elif extra.strip(" \"'") in EXTRAS:
                found.append(requirement.rpartition(";")[0])
    return found


def write_rest(root: str, folder: str, release: str, without_torch: bool) -> None:
    """Add the script, the README and the checksums of all files to the wheels."""
    source = os.path.join(root, "third_party", "wheelhouse")
    shutil.copy(os.path.join(source, "install.sh"), folder)
    with open(os.path.join(source, "README.txt"), encoding="utf-8") as file:
        text = file.read().format(
            version=fairseq_deep.__version__,
            system=f"{platform.system()} on {platform.machine()}",
            python=release,
            torch="without torch: the machine has its own" if without_torch else "with torch",
            libc=" ".join(platform.libc_ver()).strip() or "an unknown C library",
        )
    with open(os.path.join(folder, "README.txt"), "w", encoding="utf-8") as file:
        file.write(text)
    paths = sorted(
        os.path.relpath(os.path.join(place, name), folder) for place, _, names in os.walk(folder) for name in names
    )
    with open(os.path.join(folder, "SHA256SUMS"), "w", encoding="utf-8") as file:
        file.writelines(f"{sha256(os.path.join(folder, path))}  {path}\n" for path in paths)


def measure(folder: str) -> tuple[int, int]:
    """Return how many files a folder has, and their bytes."""
    sizes = [entry.stat().st_size for entry in os.scandir(folder)]
    return len(sizes), sum(sizes)
