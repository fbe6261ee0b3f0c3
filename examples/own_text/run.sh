#!/usr/bin/env bash
# A DLCL Transformer for your own parallel text, from text to BLEU.
#
#   examples/own_text/run.sh --data DIR                  some 10,000 pairs, two CPU cores, within 30 minutes
#   examples/own_text/run.sh --data DIR --conf base      some 100,000 pairs, one GPU
here=$(unset CDPATH; cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit
# shellcheck source=/dev/null
. "$here/../common/start.sh" recipe own_text "$@"
