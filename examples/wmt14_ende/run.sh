#!/usr/bin/env bash
# WMT14 English-German with the depth-wise LSTM (28.53 BLEU in Xu et al. 2024, Table 1), from text to BLEU.
#
#   examples/wmt14_ende/run.sh               fetch the data, train on the GPUs there are
#   examples/wmt14_ende/run.sh --data DIR    your own text: {train,valid,test}.{SRC,TGT}
set -euo pipefail
unset CDPATH
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# shellcheck disable=SC2034  # read by recipe.sh
defaults=(
  --task wmt14_ende --source-lang en --target-lang de
  --conf lstm
  --bpe-merges 32000 --vocab-threshold 0 --max-subwords 256
  --average 5 --beam 4 --lenpen 0.6 --gen-batch 32 --disk-gb 30
)
# shellcheck source=/dev/null
. "$here/../common/recipe.sh" "$@"
