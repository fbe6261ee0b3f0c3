# shellcheck shell=bash
# Starts the driver of the recipes: start.sh KIND SCRIPT WORDS... (see fairseq_deep/recipes/driver.py). It checks the
# words before the environment is made.
common=$(unset CDPATH; cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit
# shellcheck source=/dev/null
. "$common/env.sh"
export PYTHONUTF8=1
driver=${common%/examples/common}/fairseq_deep/recipes/__main__.py
if [[ ${FAIRSEQ_DEEP_ENV-} != current ]]; then
  python=$(env_find_python) || exit 2
else
  python=$(command -v python3) || env_fail "there is no python3 in PATH; activate an environment" || exit 2
fi
"$python" "$driver" "$1" "$2" check "${@:3}"
status=$?
((status != 3)) || exit 0
((status == 0)) || exit "$status"
ensure_env >&2 || exit 1
exec python3 "$driver" "$1" "$2" run "${@:3}"
