# shellcheck shell=bash
# The Python environment of the scripts. Source this file and call `ensure_env` (with `dev` for the test tools, too):
# it makes .venv in the repository from requirements.txt, or leaves it as it is if nothing has changed since, and puts
# it first in PATH. With FAIRSEQ_DEEP_ENV=current it uses the active environment and only checks it.

ensure_env() {
  local root
  root=$(unset CDPATH; cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
  if [[ ${FAIRSEQ_DEEP_ENV-} == current ]]; then
    env_check_current "$root"
    return
  fi
  [[ -z ${FAIRSEQ_DEEP_ENV-} ]] || env_fail "FAIRSEQ_DEEP_ENV must be current, not '$FAIRSEQ_DEEP_ENV', or unset" || return 1
  if ! env_is_ready "$root" "${1-}"; then
    # a second script may be making it at this moment
    (
      if command -v flock >/dev/null; then flock -n 9 || { echo "set-up: waiting for another one" && flock 9; }; fi
      env_is_ready "$root" "${1-}" || env_make "$root" "${1-}"
    ) 9>"$root/.venv.lock" || return 1
  fi
  export VIRTUAL_ENV=$root/.venv PATH=$root/.venv/bin:$PATH
  unset PYTHONHOME
  hash -r
}

env_fail() {
  printf 'set-up: %s\n' "$1" >&2
  return 1
}

env_check_current() {
  local python missing
  python=$(command -v python || command -v python3) || env_fail "no python in PATH; activate an environment" || return 1
  [[ ${FAIRSEQ_DEEP_CHECKED-} != "$python" ]] || return 0 # by the script that called this one
  missing=$("$python" -c '
import importlib
import pathlib
import sys
sys.path[:] = filter(None, sys.path)  # fairseq-train does not look into the working directory
for name in ("fairseq", "fairseq_deep"):
    try:
        module = importlib.import_module(name)
    except Exception:
        print(name)
        break
else:
    def read(folder):
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.py")}
    used = pathlib.Path(module.__file__).parent
    if read(used) != read(pathlib.Path(sys.argv[1], "fairseq_deep")):
        print("other code from", used)
' "$1" 2>/dev/null) || missing=${missing:-fairseq}
  [[ $missing != "other code from "* ]] ||
    env_fail "$python imports fairseq_deep from ${missing#other code from }, which differs from $1/fairseq_deep; run:\
 $python -m pip install -e $1, or unset FAIRSEQ_DEEP_ENV" ||
    return 1
  [[ -z $missing ]] ||
    env_fail "$python cannot import $missing; run: $python -m pip install -r requirements.txt, or unset FAIRSEQ_DEEP_ENV" ||
    return 1
  export FAIRSEQ_DEEP_CHECKED=$python
}

# What the environment was made from: its place, then the content of the files that decide what is in it.
env_stamp() {
  printf '%s %s' "$1/.venv" "$(cd "$1" && cat requirements.txt constraints.txt pyproject.toml third_party/fairseq/{*.py,*.toml,patches/*} | cksum)"
}

env_is_ready() {
  local stamp=$1/.venv/.fairseq_deep found
  [[ -f $stamp && -x $1/.venv/bin/python ]] || return 1
  found=$(<"$stamp")
  [[ $found == "$(env_stamp "$1") dev" || ($found == "$(env_stamp "$1")" && $2 != dev) ]]
}

env_make() {
  local root=$1 extra=$2 venv=$1/.venv log=$1/.venv/install.log python found
  env_check_machine "$root" || return 1
  # The mark tells ours from an environment that the user made, which is never deleted. A stamp from another place
  # means that the folder was moved, and no stamp that an earlier call was interrupted: both are created again.
  found=$(cat "$venv/.fairseq_deep" 2>/dev/null)
  if [[ -f $venv/.made_by_fairseq_deep && $found != "$venv "* ]]; then
    echo "set-up: removing the incomplete .venv"
    rm -rf "$venv"
  fi
  rm -f "$venv/.fairseq_deep"
  if [[ -x $venv/bin/python ]]; then
    env_is_new_enough "$venv/bin/python" ||
      env_fail ".venv has $("$venv/bin/python" -V 2>&1), not Python 3.11 or newer; remove .venv and try again" || return 1
  else
    python=$(env_find_python) || return 1
    echo "set-up: making .venv with $("$python" -V) ($python)"
    mkdir -p "$venv" && touch "$venv/.made_by_fairseq_deep"
    "$python" -m venv "$venv" >"$log" 2>&1 ||
      env_fail "$python -m venv failed; install Python's venv (Debian/Ubuntu: apt install python3-venv)" || return 1
  fi
  echo "set-up: building fairseq and installing requirements.txt; this takes some minutes (log: .venv/install.log)"
  env_install "$root" "$extra" || return 1
  printf '%s' "$(env_stamp "$root")${extra:+ $extra}" >"$venv/.fairseq_deep.new"
  mv "$venv/.fairseq_deep.new" "$venv/.fairseq_deep"
  echo "set-up: .venv is ready"
}

env_install() {
  local root=$1 log=$1/.venv/install.log start=$SECONDS reason
  local -a what=(-r requirements.txt -c constraints.txt)
  [[ $2 != dev ]] || what+=(-e '.[dev]')
  (
    set -o pipefail
    cd "$root" || exit 1
    .venv/bin/python -m pip install --disable-pip-version-check -q 'pip>=23.2' &&
      .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off "${what[@]}" 2>&1 |
      tee "$log" | while read -r line; do
        case $line in
          Collecting* | Processing* | Building\ wheels* | Installing\ collected*)
            line=${line%% (from*}
            printf '  %3d s  %.90s\n' $((SECONDS - start)) "${line/#Processing *\//Processing }"
            ;;
        esac
      done
  ) && return
  reason=$(grep -o 'fairseq build: .*' "$log" | head -n 1)
  env_fail "${reason:-pip failed: $(grep 'ERROR' "$log" | tail -n 1)} (all of it: $log)"
}

env_is_new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

env_find_python() {
  local name found=""
  for name in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3.14 python3; do
    if env_is_new_enough "$name"; then
      command -v "$name"
      return
    fi
    if command -v "$name" >/dev/null; then found+="${found:+, }$name is $("$name" -V 2>&1)"; fi
  done
  env_fail "no Python 3.11 or newer found (${found:-there is no python3}); install one or set PYTHON=/path/to/python3.11"
}

env_check_machine() {
  local free
  free=$(df -Pk "$1" | awk 'NR == 2 { print $4 }')
  if ((free < 3000000)) && [[ ! -d $1/.venv/lib ]]; then
    env_fail "$1 has $((free / 1000)) MB free and 3000 MB are needed; make room" || return 1
  fi
  command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null ||
    env_fail "no C++ compiler found; install one (Debian/Ubuntu: apt install g++)"
}
