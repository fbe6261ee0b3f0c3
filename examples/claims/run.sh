#!/usr/bin/env bash
# shellcheck disable=SC2154  # the options are variables of option()
# A claim of one of the four papers: its systems trained under equal conditions, one table, one picture, and what holds.
# The same command again does only what is missing.
#
#   examples/claims/run.sh --data DIR depth
set -euo pipefail
unset CDPATH
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
common=$here/../common
for part in options env; do
  # shellcheck source=/dev/null
  . "$common/$part.sh"
done
export PYTHONUTF8=1

# shellcheck disable=SC2034  # read by options.sh
argument_name="CLAIM... (--list shows them)"
option help bool false "show this text and stop"
option list bool false "show the claims and stop"
option scale 'mini|base' mini "mini: width 128, a CPU; base: width 512, a GPU"
option data str '' "folder with parallel text {train,valid,test}.{SRC,TGT}, plain or .gz"
option demo bool false "the small built-in corpus, to try the command"
option source_lang str en "language of the source"
option target_lang str de "language of the target"
option seeds str 1 "random seeds: 3 (that is 1, 2 and 3), or a list such as 4,7"
option updates auto auto "updates of every training; auto: those of the scale"
option jobs count 1 "trainings at the same time"
option exp str auto "folder of the claims; auto: exp/claims-SCALE(-demo) in the repository"
option ngpu auto auto "GPUs of each training; 0: the CPU; auto: the visible ones, divided by --jobs"
option precision 'fp32|fp16|bf16|amp' fp32 "fp32, fp16, bf16 or amp"
option workers autocount auto "processes for text work; auto: the number of cores"
option resamples int 1000 "of the paired bootstrap"
option speed bool true "measure times where the claim is about them; false: leave them out"
option rounds count 3 "how often each system is timed, in turns"
option dry_run bool false "check everything, print what would be trained and change nothing"
option table_only bool false "train nothing: judge what is there"

main() {
  parse_options user "$@"
  if $help; then
    help=false
    usage "$0"
    return
  fi
  if [[ $exp == auto ]]; then
    exp=$(cd "$here/../.." && pwd)/exp/claims-$scale
    ! $demo || exp+=-demo
  fi
  [[ $exp == /* ]] || exp=$PWD/$exp
  ensure_env >&2
  export PYTHONPATH=$common:$here/../compare${PYTHONPATH:+:$PYTHONPATH}
  exec python3 "$here/claims.py" --list "$list" --scale "$scale" --data="$data" --demo "$demo" --source-lang "$source_lang" \
    --target-lang "$target_lang" --seeds "$seeds" --updates "$updates" --jobs "$jobs" --exp "$exp" --ngpu "$ngpu" \
    --precision "$precision" --workers "$workers" --resamples "$resamples" --speed "$speed" --rounds "$rounds" \
    --dry-run "$dry_run" --table-only "$table_only" -- "${#arguments[@]}" "${arguments[@]}" "${extra_flags[@]}"
}

main "$@"
