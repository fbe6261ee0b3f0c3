#!/usr/bin/env bash
# WMT14 English-French with the big depth-wise LSTM (43.11 BLEU in Xu et al. 2024, Table 1), from text to BLEU.
#
#   examples/wmt14_enfr/run.sh               fetch the data, train on the GPUs there are
#   examples/wmt14_enfr/run.sh --data DIR    your own text: {train,valid,test}.{SRC,TGT}
set -euo pipefail
unset CDPATH
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# shellcheck disable=SC2034  # read by recipe.sh
defaults=(
  --task wmt14_enfr --source-lang en --target-lang fr
  --conf lstm_big
  --bpe-merges 32000 --vocab-threshold 0 --max-subwords 256
  --average 5 --beam 4 --lenpen 0.6 --gen-batch 32 --disk-gb 150
)
# shellcheck source=/dev/null
. "$here/../common/recipe.sh" "$@"
