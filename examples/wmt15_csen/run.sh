#!/usr/bin/env bash
# WMT15 Czech-English with the depth-wise LSTM (29.15 BLEU in Xu et al. 2024, Table 6), from text to BLEU.
#
#   examples/wmt15_csen/run.sh               fetch the data, train on the GPUs there are
#   examples/wmt15_csen/run.sh --data DIR    your own text: {train,valid,test}.{SRC,TGT}
here=$(unset CDPATH; cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit
# shellcheck source=/dev/null
. "$here/../common/start.sh" recipe wmt15_csen "$@"
