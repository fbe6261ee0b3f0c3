#!/usr/bin/env bash
# A DLCL Transformer for your own parallel text, from text to BLEU.
#
#   examples/own_text/run.sh --data DIR                  some 10,000 pairs, two CPU cores, within 30 minutes
#   examples/own_text/run.sh --data DIR --conf base      some 100,000 pairs, one GPU
set -euo pipefail
unset CDPATH
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# shellcheck disable=SC2034  # read by recipe.sh
defaults=(
  --task own_text --source-lang en --target-lang de
  --conf mini
  --average 5 --beam 4 --lenpen 0.6 --gen-batch 32
)
# shellcheck source=/dev/null
. "$here/../common/recipe.sh" "$@"
