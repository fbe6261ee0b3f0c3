#!/usr/bin/env bash
# OPUS-100, many to many, with the depth-wise LSTM (Xu et al. 2024, Table 7), from text to BLEU94.
#
#   examples/opus100/run.sh               fetch the corpus (99 pairs), train on the GPUs there are
#   examples/opus100/run.sh --data DIR    supervised/XX-YY/opus.XX-YY-{train,dev,test}.LANG and zero-shot/ of your own
here=$(unset CDPATH; cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit
# shellcheck source=/dev/null
. "$here/../common/start.sh" recipe opus100 "$@"
