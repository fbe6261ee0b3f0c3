# shellcheck shell=bash disable=SC2154,SC2034  # options and settings are shared between the sourced files
# How many devices there are, on all machines, and the tokens per update: devices x max-tokens x update-freq.

commas() {
  local n=$1 out=''
  while ((${#n} > 3)); do
    out=,${n: -3}$out
    n=${n:0:${#n}-3}
  done
  printf %s "$n$out"
}

detect_gpus() {
  local seen=0
  local -a ids
  command -v nvidia-smi >/dev/null && seen=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
  if [[ -v CUDA_VISIBLE_DEVICES ]]; then
    IFS=, read -r -a ids <<<"${CUDA_VISIBLE_DEVICES/#-1/}"
    ((${#ids[@]} < seen)) && seen=${#ids[@]}
  fi
  printf %s "$seen"
}

resolve_devices() {
  [[ $ngpu == auto ]] && ngpu=$(detect_gpus)
  ((ngpu == 0 || cpu_processes == 1)) || die "--cpu-processes is for --ngpu 0: on GPUs there is one process for each"
  processes=$((ngpu > 0 ? ngpu : cpu_processes))  # on each machine
  devices=$((nnodes * processes))
  device_name=CPU
  ((ngpu > 0)) && device_name=GPU
  ((devices == 1)) || device_name+=s
  if ((ngpu > 0)) && [[ $decode_precision != fp32 ]]; then
    die "--decode-precision $decode_precision is made for the CPU: leave it out, or use --ngpu 0"
  fi
  if ((ngpu == 0 && stage <= 4)) && [[ $precision == fp16 ]]; then
    die "--precision fp16 needs a GPU: fairseq has no fp16 training on the CPU; use fp32 or bf16"
  fi
  return 0
}

batch_words() {
  printf '%s %s x %s tokens x update-freq %s = %s tokens per update' \
    "$devices" "$device_name" "$(commas "$max_tokens")" "$1" "$(commas $((devices * max_tokens * $1)))"
}

# A product other than the published one is another experiment: refused unless --force-batch.
resolve_batch() {
  local step=$((devices * max_tokens)) near
  ((step > 0)) || die "--max-tokens must be at least 1"
  near=$(((batch_tokens + step / 2) / step))
  ((near > 0)) || near=1
  if [[ $update_freq == auto ]]; then
    $smoke && near=1
    update_freq=$near
  fi
  ((update_freq > 0)) || die "--update-freq must be at least 1"
  product=$((step * update_freq))
  if ((product != batch_tokens && stage <= 4)) && ! $smoke && ! $force_batch; then
    die "$(batch_words "$update_freq"), but this job is defined for $(commas "$batch_tokens"):" \
      "change --ngpu, --max-tokens or --update-freq, or accept it with --force-batch true"
  fi
}
