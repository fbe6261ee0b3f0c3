#!/usr/bin/env bash
# OPUS-100, many to many, with the depth-wise LSTM (Xu et al. 2024, Table 7), from text to BLEU94.
#
#   examples/opus100/run.sh               fetch the corpus (99 pairs), train on the GPUs there are
#   examples/opus100/run.sh --data DIR    supervised/XX-YY/opus.XX-YY-{train,dev,test}.LANG and zero-shot/ of your own
set -euo pipefail
unset CDPATH
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# shellcheck disable=SC2034  # read by recipe.sh
defaults=(
  --task opus100 --multilingual true --source-lang src --target-lang tgt
  --conf lstm
  --bpe sentencepiece --bpe-merges 64000 --vocab-threshold 0 --max-subwords 256
  --average 5 --beam 4 --lenpen 0.6 --gen-batch 64 --disk-gb 150
)
# shellcheck source=/dev/null
. "$here/../common/recipe.sh" "$@"
