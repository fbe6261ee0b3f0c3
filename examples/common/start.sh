# shellcheck shell=bash
# Starts the driver of the experiments, in their environment: start.sh KIND SCRIPT WORDS... (see
# fairseq_deep/recipes/driver.py).
common=$(unset CDPATH; cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit
# shellcheck source=/dev/null
. "$common/env.sh"
export PYTHONUTF8=1
ensure_env >&2 || exit 1
exec python3 "${common%/examples/common}/fairseq_deep/recipes/__main__.py" "$@"
