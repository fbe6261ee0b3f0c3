#!/usr/bin/env bash
# WMT18 English-Finnish with DS-Init and MAtt (15.8 BLEU in Zhang et al. 2019, Table 5), from text to BLEU.
#
#   examples/wmt18_enfi/run.sh               fetch the data, train on the GPUs there are
#   examples/wmt18_enfi/run.sh --data DIR    your own text: {train,valid,test}.{SRC,TGT}
set -euo pipefail
unset CDPATH
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# shellcheck disable=SC2034  # read by recipe.sh
defaults=(
  --task wmt18_enfi --source-lang en --target-lang "fi"
  --conf ds_matt_12l12l
  --bpe-merges 32000 --vocab-threshold 0 --max-subwords 256
  --average 5 --beam 4 --lenpen 0.6 --gen-batch 32
)
# shellcheck source=/dev/null
. "$here/../common/recipe.sh" "$@"
