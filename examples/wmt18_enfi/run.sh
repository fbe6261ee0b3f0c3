#!/usr/bin/env bash
# WMT18 English-Finnish with DS-Init and MAtt (15.8 BLEU in Zhang et al. 2019, Table 5), from text to BLEU.
#
#   examples/wmt18_enfi/run.sh               fetch the data, train on the GPUs there are
#   examples/wmt18_enfi/run.sh --data DIR    your own text: {train,valid,test}.{SRC,TGT}
here=$(unset CDPATH; cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit
# shellcheck source=/dev/null
. "$here/../common/start.sh" recipe wmt18_enfi "$@"
