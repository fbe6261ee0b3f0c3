# shellcheck shell=bash
# Starts a command of fairseq-deep in the environment of the scripts: start.sh recipe TASK WORDS... or start.sh compare
# WORDS...
common=$(unset CDPATH; cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit
# shellcheck source=/dev/null
. "$common/env.sh"
export PYTHONUTF8=1 FAIRSEQ_DEEP_ENV=${FAIRSEQ_DEEP_ENV-}
ensure_env >&2 || exit 1
exec python3 "${common%/examples/common}/fairseq_deep/recipes/__main__.py" "$@"
