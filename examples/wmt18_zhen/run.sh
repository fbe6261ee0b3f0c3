#!/usr/bin/env bash
# WMT18 Chinese-English with DS-Init and MAtt (22.3 BLEU in Zhang et al. 2019, Table 5), from text to BLEU.
#
#   examples/wmt18_zhen/run.sh               fetch the data, train on the GPUs there are
#   examples/wmt18_zhen/run.sh --data DIR    your own text: {train,valid,test}.{SRC,TGT}
here=$(unset CDPATH; cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit
# shellcheck source=/dev/null
. "$here/../common/start.sh" recipe wmt18_zhen "$@"
