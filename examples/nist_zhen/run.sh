#!/usr/bin/env bash
# NIST Chinese-English with the 25-layer DLCL Transformer (52.11 BLEU in Wang et al. 2019, Table 3), from text to BLEU.
#
#   examples/nist_zhen/run.sh --data DIR    {train,valid,test,test1,test2}.{zh,en} from the LDC, and test*.en.ref1 ...
set -euo pipefail
unset CDPATH
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# shellcheck disable=SC2034  # read by recipe.sh
defaults=(
  --task nist_zhen --source-lang zh --target-lang en
  --conf dlcl_25l
  --subsets "test,test1,test2" --lowercase true
  --bpe per-side --embeddings target --bpe-merges 32000 --vocab-threshold 0 --max-words 100
  --average 5 --beam 6 --lenpen 1.0 --gen-batch 32
)
# shellcheck source=/dev/null
. "$here/../common/recipe.sh" "$@"
