#!/usr/bin/env bash
# Everything that must hold before a change goes in: ruff, codespell, shellcheck and all tests. Arguments go to pytest.
# --package checks what is released instead, --docs the documentation site.
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

echo "ruff"
ruff check .
echo "codespell"
codespell # words that are right, or other languages: tests/data/spelling.txt
echo "shellcheck"
find . \( -name .git -o -name .venv -o -name build -o -name exp \) -prune -o \( -name '*.sh' -o -name '*.sbatch' -o -path ./.ci/run \) -print0 |
  xargs -0 shellcheck -x
echo "pytest"
python -m compileall -q fairseq_deep # once, and not in each process where PYTHONDONTWRITEBYTECODE is set
unset PYTHONDONTWRITEBYTECODE        # pytest keeps what it makes of the tests, which takes each worker four seconds
exec python -m pytest -q -n 2 --dist worksteal "$@"
