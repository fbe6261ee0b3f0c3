#!/usr/bin/env bash
# WMT15 Czech-English with the depth-wise LSTM (29.15 BLEU in Xu et al. 2024, Table 6), from text to BLEU.
#
#   examples/wmt15_csen/run.sh               fetch the data, train on the GPUs there are
#   examples/wmt15_csen/run.sh --data DIR    your own text: {train,valid,test}.{SRC,TGT}
set -euo pipefail
unset CDPATH
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# shellcheck disable=SC2034  # read by recipe.sh
defaults=(
  --task wmt15_csen --source-lang cs --target-lang en
  --conf wmt14_ende/lstm
  --bpe-merges 32000 --vocab-threshold 0 --max-subwords 256
  --average 5 --beam 4 --lenpen 0.6 --gen-batch 32 --disk-gb 90
)
# shellcheck source=/dev/null
. "$here/../common/recipe.sh" "$@"
