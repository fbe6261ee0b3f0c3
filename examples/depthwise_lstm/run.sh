#!/usr/bin/env bash
# One depth-wise LSTM, from text to BLEU; ../compare/run.sh puts several systems side by side.
#
#   examples/depthwise_lstm/run.sh --data DIR --arch transformer_lstm_12l12l
here=$(unset CDPATH; cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit
# shellcheck source=/dev/null
. "$here/../common/start.sh" recipe depthwise_lstm "$@"
