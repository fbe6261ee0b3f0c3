#!/usr/bin/env bash
# One depth-wise LSTM, from text to BLEU; ../compare/run.sh puts several systems side by side.
#
#   examples/depthwise_lstm/run.sh --data DIR --arch transformer_lstm_12l12l
set -euo pipefail
unset CDPATH
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# shellcheck disable=SC2034  # read by recipe.sh
defaults=(
  --task depthwise_lstm --source-lang en --target-lang de
  --arch transformer_lstm_6l --conf mini
  --vocab-threshold 0
  --average 3 --beam 4 --lenpen 0.6 --max-len-a 1.2 --max-len-b 10
)
# shellcheck source=/dev/null
. "$here/../common/recipe.sh" "$@"
