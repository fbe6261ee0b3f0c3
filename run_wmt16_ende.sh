#!/usr/bin/env bash
# WMT16 English-German with the 30-layer DLCL Transformer (29.3 BLEU in Wang et al. 2019, Table 1), from text to BLEU.
#
#   ./run_wmt16_ende.sh --demo         5 to 10 minutes without a GPU, on Linux or macOS
#   ./run_wmt16_ende.sh --help         the options
#   ./run_wmt16_ende.sh --dry-run      every command of the real job
here=$(unset CDPATH; cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit
# shellcheck source=/dev/null
. "$here/examples/common/start.sh" recipe wmt16_ende "$@"
