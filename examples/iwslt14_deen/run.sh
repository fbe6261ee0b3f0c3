#!/usr/bin/env bash
# IWSLT14 German-English (160,000 pairs of talks, lower case) with a 20-layer DLCL Transformer, from text to BLEU.
#
#   examples/iwslt14_deen/run.sh               fetch the data, train on the GPUs there are
#   examples/iwslt14_deen/run.sh --data DIR    your own {train,valid,test}.{de,en}
here=$(unset CDPATH; cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit
# shellcheck source=/dev/null
. "$here/../common/start.sh" recipe iwslt14_deen "$@"
