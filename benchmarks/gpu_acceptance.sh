#!/usr/bin/env bash
# shellcheck disable=SC2154  # the options are variables of option()
# All that has to be seen on a GPU, in one command of about 25 minutes: that models compute there what they compute on a
# CPU, what their kernels, times and memory are beside the model's counts, and how they train on real text. What is done
# is written at once; a step that fails is told at the end, and does not stop the others.
#
#   benchmarks/gpu_acceptance.sh --data DIR [--source-lang de --target-lang en]
#   benchmarks/gpu_acceptance.sh --device cpu --small true      (a trial of every step, some minutes)
set -euo pipefail
unset CDPATH
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root=$(cd "$here/.." && pwd)
for part in options run env; do
  # shellcheck source=/dev/null
  . "$root/examples/common/$part.sh"
done
export PYTHONUTF8=1

option help bool false "show this text and stop"
option device 'cuda|cpu' cuda "where to run"
option small bool false "tiny models and few updates: a trial of the script itself"
option out str auto "folder of the results; auto: exp/gpu-acceptance in the repository"
option data str '' "folder with parallel text {train,valid,test}.{SRC,TGT}; without it, the small built-in corpus"
option source_lang str de "language of the source"
option target_lang str en "language of the target"
option updates auto auto "updates of each training; auto: 1,500, or 20 if small"
option precision 'fp32|fp16|bf16|amp' fp16 "of the trainings (fp32 on a CPU)"
option systems str 'prenorm_6l lstm_6l prenorm_30l dlcl_30l' "what is trained"

# run a step: its title, then the command. Its output goes to the screen, to a file of its own and to RESULTS.txt.
run_step() {
  local title=$1 log start=$SECONDS status=0
  shift
  steps=$((steps + 1))
  log=$out/$(printf '%02d' "$steps")-${title// /-}.txt
  printf '\n== %s\n$ %s\n' "$title" "$*" | tee -a "$out/RESULTS.txt"
  "$@" 2>&1 | tee "$log" || status=$?
  cat "$log" >>"$out/RESULTS.txt"
  if ((status)); then failed+=("$title"); fi
  printf '(%d s, exit status %d)\n' $((SECONDS - start)) "$status" | tee -a "$out/RESULTS.txt"
}

environment() {
  local commit
  commit=$(git -C "$root" describe --always --dirty 2>/dev/null || echo "not a git checkout")
  echo "commit $commit, $(date -u '+%Y-%m-%d %H:%M UTC')"
  python3 - <<'PY'
import platform
import torch
print(f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
for index in range(torch.cuda.device_count()):
    found = torch.cuda.get_device_properties(index)
    print(f"{found.name}, {found.total_memory / 2**30:.0f} GiB, compute capability {found.major}.{found.minor}")
PY
}

tables() {
  local -a measure=(python3 "$here/device_model.py" --measure "$device") large=() size=()
  if $small; then
    size=(--tokens 64 --length 16 --words 1000 --sentences 2 --beam 2 --step 4 --encoder-layers 2 --decoder-layers 2)
    size+=(--precision fp32 --encoder-embed-dim 64 --decoder-embed-dim 64)
    size+=(--encoder-attention-heads 4 --decoder-attention-heads 4)
  else
    large=(transformer_prenorm_30l transformer_dlcl_30l)
  fi
  run_step "training step, optimizer and decoding step" "${measure[@]}" --json "$out/counts.json" "${size[@]}" \
    --arch transformer_prenorm_6l transformer_dlcl_6l transformer_lstm_6l transformer_matt_6l "${large[@]}"
  run_step "with fused_adam" "${measure[@]}" --what optimizer --optimizer fused_adam "${size[@]}" \
    --arch transformer_prenorm_6l "${large[@]}"
  run_step "training step compiled" "${measure[@]}" --compile --what training "${size[@]}" \
    --arch transformer_prenorm_6l transformer_lstm_6l "${large[@]}"
}

trainings() {
  local -a command=("$root/examples/compare/run.sh" --exp "$out/trainings" --source-lang "$source_lang"
    --target-lang "$target_lang" --updates "$updates" --average 1)
  local -a names
  read -ra names <<<"$systems"
  if [[ -n $data ]]; then command+=(--data "$data"); else command+=(--demo --source-lang en --target-lang de); fi
  if $small; then
    command+=(--conf mini --width 32 --heads 2)
    names=(prenorm_2l2l_tiny dlcl_2l2l_tiny)
  elif [[ $device == cuda ]]; then
    command+=(--conf base)
  fi
  if [[ $device == cuda ]]; then command+=(--precision "$precision"); else command+=(--ngpu 0); fi
  run_step "trainings on text" "${command[@]}" "${names[@]}" -- --optimizer fused_adam
}

main() {
  local steps=0
  local -a failed=() check=()
  parse_options user "$@"
  if $help; then
    help=false
    usage "$0"
    return
  fi
  [[ $out != auto ]] || out=$root/exp/gpu-acceptance
  [[ $updates != auto ]] || updates=$($small && echo 20 || echo 1500)
  [[ -z $data || -d $data ]] || die "--data $data: no such folder"
  ensure_env >&2
  [[ $device == cpu ]] || python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    die "there is no GPU here that torch can use: use --device cpu --small true for a trial"
  mkdir -p "$out"
  : >"$out/RESULTS.txt"
  run_step "environment" environment
  check=(python3 "$here/gpu_check.py" --device "$device")
  if $small; then check+=(--layers 2 --width 32 --only "plain pre-norm" DLCL LSTM --compile); fi
  run_step "correctness" "${check[@]}"
  tables
  trainings
  printf '\n%d steps, %d failed%s; results: %s\n' "$steps" "${#failed[@]}" "${failed[*]:+: ${failed[*]}}" "$out/RESULTS.txt"
  ((${#failed[@]} == 0))
}

main "$@"
