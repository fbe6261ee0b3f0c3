#!/usr/bin/env bash
# Everything that must hold before a change goes in: ruff, codespell, shellcheck and all tests. Arguments go to pytest,
# and then only the tests run.
# --package checks what is released instead, --docs the documentation site. --nightly runs the long random and exhaustive
# tests alone, and prints their seed; SEED=N repeats a night. --changed runs the tests of what differs from main.
set -euo pipefail
unset CDPATH
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1-} in --package | --docs) exec "tests/${1#--}.sh" ;; esac
# shellcheck source=examples/common/env.sh
. examples/common/env.sh
ensure_env dev
export OMP_NUM_THREADS=1
# torch's cache of compiled code ignores ATEN_CPU_CAPABILITY: code for AVX-512 gives NaN where AVX2 is imitated
export TORCHINDUCTOR_CACHE_DIR="$PWD/.venv/inductor/${ATEN_CPU_CAPABILITY-default}"

tracked() { git ls-files -z -- "$@"; } # the repository's files, not yours in the same directory

if [[ ${1---changed} == --changed ]] && git rev-parse --git-dir >/dev/null 2>&1; then
  echo "ruff"
  tracked '*.py' | xargs -0 ruff check --force-exclude
  echo "codespell"
  tracked | xargs -0 codespell # words that are right, or other languages: tests/data/spelling.txt
  echo "shellcheck"
  tracked '*.sh' '*.sbatch' .ci/run | xargs -0 shellcheck -x
fi
# tests_of FILE ...: the tests that a change of these files can affect
tests_of() {
  local file
  for file; do
    case $file in
      tests/test_*.py | tests/*/test_*.py) [[ ! -f $file ]] || echo "$file" ;;
      tests/errors/*) echo tests/errors ;;
      tests/snapshots/*) echo tests/project/test_snapshots.py ;;
      fairseq_deep/core/*) echo tests/{core,errors,plugin,runtime,benchmarks} ;;
      fairseq_deep/plugin/* | third_party/fairseq/*) echo tests/{plugin,errors,core/test_methods.py} ;;
      fairseq_deep/{tools,runtime,serving,huggingface}/*) echo tests/{commands,tools,runtime,serving,huggingface,errors} ;;
      fairseq_deep/recipes/* | examples/* | run_wmt16_ende.sh) echo tests/{recipes,errors} ;;
      benchmarks/*) echo tests/benchmarks ;;
      *.md) ;;
      *) echo tests ;; # what all share
    esac
    echo tests/project
  done | tr ' ' '\n' | sort -u
}

if [[ ${1-} == --changed ]]; then
  shift
  mapfile -t files < <(git diff --name-only "$(git merge-base HEAD main)"; git ls-files --others --exclude-standard)
  mapfile -t places < <(tests_of "${files[@]}")
  ((${#places[@]})) || { echo "nothing differs from main"; exit 0; }
  [[ " ${places[*]} " != *" tests "* ]] || places=()
  set -- "$@" "${places[@]}"
elif [[ ${1-} == --nightly ]]; then
  shift
  seed=${SEED-$(date +%s)}
  echo "seed: $seed"
  export FAIRSEQ_DEEP_FUZZ="${FAIRSEQ_DEEP_FUZZ-15}" # times as many random files and command lines
  set -- -m "nightly or fuzz" --hypothesis-seed="$seed" "$@"
fi
echo "pytest"
python -m compileall -q fairseq_deep # once, and not in each process where PYTHONDONTWRITEBYTECODE is set
unset PYTHONDONTWRITEBYTECODE        # pytest keeps what it makes of the tests, which takes each worker four seconds
exec python -m pytest -q -n 2 --dist worksteal "$@"
