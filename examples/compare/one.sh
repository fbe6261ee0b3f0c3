#!/usr/bin/env bash
# One training of the comparison, from text to BLEU; run.sh calls it for each system and seed.
set -euo pipefail
unset CDPATH
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# shellcheck disable=SC2034  # read by recipe.sh
defaults=(
  --task compare --source-lang en --target-lang de --conf mini --nnodes 1
  --vocab-threshold 0
  --beam 4 --lenpen 0.6 --max-len-a 1.2 --max-len-b 10
)
# shellcheck source=/dev/null
. "$here/../common/recipe.sh" "$@"
