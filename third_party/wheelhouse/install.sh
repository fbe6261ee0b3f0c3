#!/usr/bin/env bash
# Install fairseq and fairseq_deep from the wheels beside this script, without a package index:
#     ./install.sh VENV        makes the environment VENV, which must not be there yet, and runs `fairseq-deep doctor`
# PYTHON=/path/to/python chooses the interpreter. Where the folder holds no torch, VENV uses that interpreter's.
set -euo pipefail
unset CDPATH PYTHONHOME

die() {
  printf 'install.sh: %s\n' "$1" >&2
  exit 2
}

absolute() {
  [[ $1 == /* ]] && echo "$1" || echo "$PWD/$1"
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[[ $# == 1 && $1 != -* ]] || die "usage: $0 VENV (a folder that is not there yet)"
venv=$(absolute "$1")
[[ ! -e $venv ]] || die "$venv exists; give another name"

(cd "$here" && sha256sum --quiet -c SHA256SUMS >/dev/null 2>&1) ||
  die "a file of $here is missing or damaged (sha256sum -c SHA256SUMS says which one); copy the folder again"
listed=$(sed -n 's|^[0-9a-f]\{64\} [ *]\(wheels/.*\)|\1|p' "$here/SHA256SUMS")
other=$(cd "$here" && { find wheels -type l; find wheels ! -type d | grep -vxF -e "$listed"; } | head -n 1) || true
[[ -z $other ]] || die "$here/$other is a link or not in SHA256SUMS; remove it, or copy the folder again"

# fairseq-VERSION-cp312-cp312-linux_x86_64.whl is for Python 3.12
fairseq=$(cd "$here/wheels" && echo fairseq-*.whl)
tag=${fairseq#*-cp3}
wanted=3.${tag%%-*}
cure="set PYTHON=/path/to/python$wanted"
python=$(command -v "${PYTHON:-python$wanted}") || die "${PYTHON:-python$wanted} is not there; $cure"
python=$(absolute "$python")
cd "$here/wheels" # Python imports modules of the current directory, and this one holds nothing but listed wheels
found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || die "$python does not run"
[[ $found == "$wanted" ]] || die "$python is Python $found, and these wheels are for $wanted; $cure"

packages=""
if ! compgen -G "$here/wheels/torch-*.whl" >/dev/null; then
  packages=$("$python" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null) ||
    die "$python has no torch, and this folder neither; set PYTHON to one that has, or make the folder with torch"
fi

trap '[[ -n ${done-} ]] || rm -rf "$venv"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
echo "install.sh: making $venv with Python $found ($python)"
"$python" -m venv "$venv" >/dev/null 2>&1 ||
  die "$python -m venv $venv failed; see to the disk, or install Python's venv"
if [[ -n $packages ]]; then
  echo "install.sh: torch is that of $packages"
  # the setuptools of a new environment can be older than that torch asks for
  "$venv/bin/python" -m pip --isolated uninstall -q -y setuptools >/dev/null 2>&1 || true
  "$venv/bin/python" -c 'import sys, sysconfig
with open(sysconfig.get_paths()["purelib"] + "/torch_of_this_machine.pth", "w") as file:
    print(sys.argv[1], file=file)' "$packages"
fi
# NAME==VERSION --hash=sha256:SUM of each wheel whose name begins so
wanted() {
  sed -n "s|^\\([0-9a-f]\\{64\\}\\) [ *]wheels/\\($1[^-]*\\)-\\([^-]*\\)-.*\\.whl\$|\\2==\\3 --hash=sha256:\\1|p" "$here/SHA256SUMS"
}
# nothing but files with these sums: neither the variables nor the files that configure pip are read
install() {
  local -a pip=("$venv/bin/python" -m pip --isolated --disable-pip-version-check install --no-index --no-compile)
  wanted "$1" >"$venv/wanted.txt"
  PIP_CONFIG_FILE=/dev/null "${pip[@]}" --require-hashes --find-links "$here/wheels" "${@:2}" -r "$venv/wanted.txt" \
    >>"$venv/install.log" 2>&1 || die "pip failed: $(grep ERROR "$venv/install.log" | tail -n 1)"
}
install ""
# pip leaves out what the packages beside that torch hold in the same release
[[ -x $venv/bin/fairseq-train && -x $venv/bin/fairseq-deep ]] || install fairseq --no-deps --force-reinstall
done=1
echo "install.sh: $venv is ready: . $venv/bin/activate"
PATH=$(cd "$venv/bin" && pwd):$PATH
exec fairseq-deep doctor
