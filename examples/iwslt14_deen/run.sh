#!/usr/bin/env bash
# IWSLT14 German-English (160,000 pairs of talks, lower case) with a 20-layer DLCL Transformer, from text to BLEU.
#
#   examples/iwslt14_deen/run.sh               fetch the data, train on the GPUs there are
#   examples/iwslt14_deen/run.sh --data DIR    your own {train,valid,test}.{de,en}
set -euo pipefail
unset CDPATH
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# shellcheck disable=SC2034  # read by recipe.sh
defaults=(
  --task iwslt14_deen --source-lang de --target-lang en
  --conf dlcl_20l
  --download-max-words 175 --lowercase true
  --bpe-merges 10000 --vocab-threshold 0
  --average 5 --beam 5 --lenpen 1.0 --gen-batch 64
)
# shellcheck source=/dev/null
. "$here/../common/recipe.sh" "$@"
