#!/usr/bin/env bash
# WMT14 English-French with the big depth-wise LSTM (43.11 BLEU in Xu et al. 2024, Table 1), from text to BLEU.
#
#   examples/wmt14_enfr/run.sh               fetch the data, train on the GPUs there are
#   examples/wmt14_enfr/run.sh --data DIR    your own text: {train,valid,test}.{SRC,TGT}
here=$(unset CDPATH; cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit
# shellcheck source=/dev/null
. "$here/../common/start.sh" recipe wmt14_enfr "$@"
