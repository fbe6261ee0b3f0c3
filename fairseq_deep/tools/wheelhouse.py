"""collect the wheels for a machine without a package index, with an installation script

fairseq is compiled for one Python release, so an interpreter of this release is required on this machine.
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
from fairseq_deep.runtime.files import checksum
from fairseq_deep.tools import UsageError, new_folder

OLDEST = (3, 11)
EXTRAS = ("plot", "train")
TORCH = "torch"
TOLD = ("Collecting ", "Processing ", "Building wheels")
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the interpreter, the directory and its contents."""
    parser.add_argument("--output", required=True, metavar="DIR", help="directory to create")
    running = "{}.{}".format(*sys.version_info)
    text = "Python release of the target machine, or a local interpreter of this release (default: %(default)s)"
    parser.add_argument("--python", default=running, metavar="3.X", help=text)
    text = "omit torch, for a machine with preinstalled torch"
    parser.add_argument("--without-torch", action="store_true", help=text)
    parser.add_argument("--fairseq", metavar="WHEEL", help="wheel of our fairseq to use instead of building one")


def run(args: argparse.Namespace) -> int:
    """Create the directory atomically."""
    root = find_repository()
    if args.fairseq and not os.path.isfile(args.fairseq):
        raise UsageError(f"--fairseq {args.fairseq}: no such file; correct the path")
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
    print(f"{args.output}: {count} wheels, {size / 1e6:.0f} MB; on the target machine: ./install.sh VENV")
    return 0


def find_repository() -> str:
    """Return the root of the clone that this package is installed from, or raise `UsageError`."""
    root = os.path.dirname(os.path.abspath(fairseq_deep.__path__[0]))
    if not os.path.isfile(os.path.join(root, "third_party", "fairseq", "backend.py")):
        raise UsageError(
            "building fairseq requires the repository, but this package was installed without it; "
            "run this in the environment of a clone (pip install -e .)"
        )
    return root


def find_python(wanted: str) -> tuple[str, str]:
    """Return the path and the release of the interpreter *wanted* ("3.12" or a path).

    Raises:
        UsageError: the interpreter does not exist, or is too old
    """
    named = None if re.fullmatch(r"3\.\d+", wanted) else wanted
    if named and not shutil.which(named):
        raise UsageError(f"--python {wanted} must be a release, such as 3.12, or an interpreter on this machine")
    for path in [named] if named else _candidates(wanted):
        release = _release(path)
        if release and (named or release == wanted):
            if tuple(map(int, release.split("."))) < OLDEST:
                raise UsageError(f"Python {release} is not supported; use 3.11 or newer")
            return shutil.which(path), release
    if named:
        raise UsageError(f"--python {wanted}: the interpreter does not run; give another one")
    raise UsageError(
        f"Python {wanted}, which is required to compile fairseq, is missing; install it with its headers "
        f"(Debian/Ubuntu: apt install python{wanted}-dev python{wanted}-venv), or give --python /path/to/python{wanted}"
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
    """Create the environment for building wheels, with the pip of *interpreter*."""
    done = subprocess.run([interpreter, "-m", "venv", folder], capture_output=True, text=True)
    if done.returncode:
        last = (done.stdout + done.stderr).strip().splitlines() or ["no reason given"]
        raise UsageError(f"{interpreter} -m venv failed ({last[-1]}); install Python's venv, or free disk space")


def copy_package(root: str, folder: str) -> str:
    """Copy the sources of fairseq_deep; a build in the repository could include files of older builds."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(os.path.join(root, "fairseq_deep"), os.path.join(folder, "fairseq_deep"), ignore=ignored)
    for name in SOURCES:
        shutil.copy(os.path.join(root, name), folder)
    return folder


def copy_fairseq(path: str, wheels: str, release: str) -> None:
    """Copy a wheel of our fairseq; raise `UsageError` if it is another wheel, or for another Python than *release*."""
    name = os.path.basename(path)
    tag = "cp" + release.replace(".", "")
    if not re.fullmatch(rf"fairseq-[^-]*\+deep\d+-{tag}-\w+-\w+\.whl", name):
        raise UsageError(f"--fairseq {path}: not our fairseq's wheel for Python {release} (fairseq-...+deepN-{tag}-)")
    shutil.copy(path, wheels)


class Pip:
    """``pip wheel`` of one interpreter, run in the repository *root* with progress; writes to the directory *wheels*.

    pip's own configuration selects the package index.
    """

    def __init__(self, python: str, wheels: str, root: str):
        self.command = [python, "-m", "pip", "wheel", "--disable-pip-version-check", "--progress-bar", "off"]
        self.command += ["--wheel-dir", wheels, "--find-links", wheels]
        self.root, self.start = root, time.monotonic()

    def wheel(self, *arguments: str) -> None:
        """Build wheels; raise `UsageError` with the reason if pip or the build of fairseq fails."""
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
    return lines[-1] if lines else "no output"


def requirements(wheels: str, without_torch: bool) -> list[str]:
    """Return the requirements of fairseq and fairseq_deep from their wheels."""
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
            torch="without torch: use the preinstalled one" if without_torch else "with torch",
            libc=" ".join(platform.libc_ver()).strip() or "an unknown C library",
        )
    with open(os.path.join(folder, "README.txt"), "w", encoding="utf-8") as file:
        file.write(text)
    paths = sorted(
        os.path.relpath(os.path.join(place, name), folder) for place, _, names in os.walk(folder) for name in names
    )
    with open(os.path.join(folder, "SHA256SUMS"), "w", encoding="utf-8") as file:
        file.writelines(f"{checksum(os.path.join(folder, path))}  {path}\n" for path in paths)


def measure(folder: str) -> tuple[int, int]:
    """Return the number of files in a directory, and their total size in bytes."""
    sizes = [entry.stat().st_size for entry in os.scandir(folder)]
    return len(sizes), sum(sizes)
