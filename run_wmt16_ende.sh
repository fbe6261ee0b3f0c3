#!/usr/bin/env bash
# WMT16 English-German with the 30-layer DLCL Transformer (29.3 BLEU in Wang et al. 2019, Table 1), from text to BLEU.
#
#   ./run_wmt16_ende.sh --demo         about ten minutes without a GPU, on Linux or macOS with bash 4.4
#   ./run_wmt16_ende.sh --help         the options
#   ./run_wmt16_ende.sh --dry-run      every command of the real job
set -euo pipefail
unset CDPATH
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# shellcheck disable=SC2034  # read by recipe.sh
defaults=(
  --task wmt16_ende --source-lang en --target-lang de
  --conf dlcl_30l
  --download-max-words 80
  --bpe-merges 32000 --vocab-threshold 5
  --subsets "valid,test" --average 5 --beam 4 --lenpen 0.6 --gen-batch 32
)
# shellcheck source=/dev/null
. "$here/examples/common/recipe.sh" "$@"
