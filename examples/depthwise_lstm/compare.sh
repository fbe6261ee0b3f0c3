#!/usr/bin/env bash
# shellcheck disable=SC2154  # the options are variables of option()
# Plain pre-norm Transformer, depth-wise RNN and depth-wise LSTM on the same data, updates, batch, seed and learning rate,
# side by side in one table. The same command again trains only what is missing.
#
#   examples/depthwise_lstm/compare.sh --data DIR [--conf mini|base] [--jobs 2]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
common=$here/../common
for part in options run env prepare; do
  # shellcheck source=/dev/null
  . "$common/$part.sh"
done

option help bool false "show this text and stop"
option dry_run bool false "print every command and change nothing"
option data str '' "folder with parallel text {train,valid,test}.{SRC,TGT}, plain or .gz"
option source_lang str en "language of the source"
option target_lang str de "language of the target"
option conf 'mini|base' mini "size: mini (width 128, a CPU) or base (width 512, a GPU)"
option systems str prenorm_6l,rnn_6l,lstm_6l,lstm_12l12l "architectures without transformer_, separated by commas"
option updates auto auto "updates of every system; auto: those of the size"
option jobs int 1 "systems that train at the same time"
option exp str auto "folder of the experiment; auto: exp/depthwise_lstm-CONF in the repository"
option ngpu auto auto "GPUs of every system; 0: the CPU; auto: all that are visible"
option max_tokens auto auto "tokens per device and step; auto: those of the size"
option update_freq auto auto "steps per update; auto: so that the tokens per update are those of the size"
option force_batch bool false "accept other tokens per update than those of the size"
option precision 'fp32|fp16|bf16|amp' fp32 "fp32, fp16, bf16 or amp"
option seed int 1 "random seed of every system"

declare -a names=() command=()

resolve() {
  local system seen=,
  [[ -n $data ]] || die "--data is missing: a folder with {train,valid,test}.{$source_lang,$target_lang}, plain or .gz"
  [[ $exp != auto ]] || exp=$(cd "$here/../.." && pwd)/exp/depthwise_lstm-$conf
  [[ $exp == /* ]] || exp=$PWD/$exp
  ((jobs > 0)) || die "--jobs must be at least 1"
  IFS=, read -r -a names <<<"$systems"
  ((${#names[@]} > 0)) || die "--systems names no architecture"
  for system in "${names[@]}"; do
    [[ $system =~ ^[a-z0-9_]+$ ]] || die "--systems: '$system' is not the name of an architecture"
    [[ $seen != *",$system,"* ]] || die "--systems names $system twice"
    seen+=$system,
  done
  # one thread for each core, shared by the systems that train at the same time
  local threads=$(($(cores) / jobs))
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
}

# recipe SYSTEM FOLDER OPTION...: sets `command`, the recipe of one system with the settings that all share.
recipe() {
  local system=$1 size=$conf name
  local -a shared=() train=()
  # the preset is that of width 512; the depth-wise systems have no feed-forward sub-layers and refuse the flag
  [[ $conf != mini || $system == lstm_* || $system == rnn_* ]] || size=mini_ffn
  for name in ngpu max_tokens update_freq force_batch; do
    [[ -z ${option_given[$name]-} ]] || shared+=("$(flag_of "$name")" "${!name}")
  done
  [[ $updates == auto ]] || train=(--max-update "$updates")
  command=("$here/run.sh" --data "$data" --source-lang "$source_lang" --target-lang "$target_lang"
    --arch "transformer_$system" --conf "$size" --exp "$exp/$2" --precision "$precision" --seed "$seed"
    "${shared[@]}" "${@:3}" -- "${train[@]}" "${extra_flags[@]}")
}

# Every command is tried without effect first: what cannot work is refused before anything is written.
check_commands() {
  local system known
  for system in "${names[@]}"; do
    recipe "$system" "$system" --dry-run
    "${command[@]}" >/dev/null || exit 2
  done
  ensure_env
  known=$(python3 -c 'from fairseq_deep.architectures import list_archs; print(*list_archs())')
  for system in "${names[@]}"; do
    # shellcheck disable=SC2086  # a list of words
    [[ " $known " == *" transformer_$system "* ]] ||
      die "--systems: there is no transformer_$system$(did_you_mean "transformer_$system" $known)"
  done
}

# The text is prepared once; every system finds it in its own folder, with the markers that say so.
share_text() {
  local system part
  recipe "${names[0]}" shared --stop-stage 3
  "${command[@]}" || exit
  for system in "${names[@]}"; do
    mkdir -p "$exp/$system"
    for part in text data-bin; do ln -sfn "../shared/$part" "$exp/$system/$part"; done
    cp "$exp"/shared/.done.[123] "$exp/$system"
  done
}

# Signs of life and scores of one system; all else that the recipe says is in its folder as well.
label() {
  local line
  while IFS= read -r line; do
    case $line in
      *'already done') ;;
      'stage '* | '  epoch'* | *' translated' | 'BLEU = '*) printf '%-14s %s\n' "$1" "$line" ;;
    esac
  done
}

stop() {
  say "stopped; to go on, give the same command again" >&2
  exit 130
}

train_all() {
  local system running=0 failed=0
  # the first process of a job is run.sh, and what it started ends with it
  # shellcheck disable=SC2046  # a list of numbers
  trap 'kill $(jobs -p) 2>/dev/null' EXIT
  trap stop INT TERM
  for system in "${names[@]}"; do
    if ((running == jobs)); then
      wait -n || failed=$((failed + 1))
      running=$((running - 1))
    fi
    recipe "$system" "$system" --stop-stage 4
    "${command[@]}" | label "$system" &
    running=$((running + 1))
  done
  for (( ; running > 0; running--)); do wait -n || failed=$((failed + 1)); done
  trap - EXIT INT TERM
  ((failed == 0)) || {
    printf 'error: %s of %s systems failed: once it is cured, give the same command again\n' "$failed" "${#names[@]}" >&2
    exit 1
  }
}

# One after the other, so that the speeds can be compared.
decode_all() {
  local system
  for system in "${names[@]}"; do
    recipe "$system" "$system"
    "${command[@]}" | label "$system"
  done
}

main() {
  local system
  parse_options user "$@"
  if $help; then
    help=false
    usage "$0"
    return
  fi
  resolve
  if $dry_run; then
    for system in "${names[@]}"; do
      recipe "$system" "$system" --dry-run
      "${command[@]}"
    done
    return
  fi
  check_commands
  share_text
  train_all
  decode_all
  PYTHONPATH=$common${PYTHONPATH:+:$PYTHONPATH} python3 "$here/table.py" --exp "$exp" "${names[@]}" || exit 2
}

main "$@"
