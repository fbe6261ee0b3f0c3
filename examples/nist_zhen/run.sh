#!/usr/bin/env bash
# NIST Chinese-English with the 25-layer DLCL Transformer (52.11 BLEU in Wang et al. 2019, Table 3), from text to BLEU.
#
#   examples/nist_zhen/run.sh --data DIR    {train,valid,test,test1,test2}.{zh,en} from the LDC, and test*.en.ref1 ...
here=$(unset CDPATH; cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit
# shellcheck source=/dev/null
. "$here/../common/start.sh" recipe nist_zhen "$@"
