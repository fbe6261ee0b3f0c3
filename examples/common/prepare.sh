# shellcheck shell=bash disable=SC2154,SC2034  # options and settings are shared between the sourced files
# From options to settings, the plan that is printed first, and the experiment folder.

cores() { nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || printf 1; }

resolve_settings() {
  progress_flags=()
  smoke_flags=()
  $demo && [[ -z ${option_given[conf]-} ]] && conf=demo
  load_conf "$examples/common/common.args"
  load_conf "$conf"
  collect_conf_flags
  check_extra_flags
  $help && return
  [[ -n $arch ]] || die "--arch is missing: none of the conf files '$conf' names one"
  ((stage <= stop_stage && stop_stage <= 7)) || die "--stage $stage, --stop-stage $stop_stage: stages run from 0 to 7"
  [[ $workers == auto ]] && workers=$(cores)
  resolve_exp
  resolve_route
  check_embeddings
  resolve_nodes
  resolve_devices
  resolve_batch
  resolve_average
  $smoke && smoke_flags=(--max-update 20 --log-interval 5)
  build_train_command
  check_train_numbers
  check_average_updates
  resolve_seeds
  resolve_against
  compute_keys
  refuse_changed_runs
  [[ -z $same_text || $same_text == "${stage_keys[3]}" ]] ||
    die "the trainings in ${exp%/*} were trained on other data, or text cut in another way: use another --exp"
}

# fairseq splits paths at ':' and prefixes at ','.
resolve_exp() {
  local name=$task-${conf//[,\/]/-}
  [[ -z ${option_given[arch]-} ]] || name+=-${arch#transformer_}
  $demo && name=demo
  $smoke && name+=-smoke
  [[ $exp == auto ]] && exp=$root/exp/$name
  [[ $exp == /* ]] || exp=$PWD/$exp
  exp=${exp%/}
  home=$exp
  [[ $exp != *[:,]* ]] || die "--exp $exp: fairseq cannot take ':' or ',' in a path; choose another folder"
  [[ ! -e $exp || -d $exp ]] || die "--exp $exp is a file: choose another folder"
  refuse_foreign_folder
}

# A folder that no recipe has made may hold a text of the user's where the recipe writes its own.
refuse_foreign_folder() {
  local part
  [[ ! -e $exp/cmd.sh && ! -e $exp/env.txt ]] || return 0
  for part in text data-bin checkpoints corpus; do
    [[ ! -e $exp/$part ]] || die "--exp $exp holds a $part that no recipe has made, and it would be overwritten:" \
      "choose another folder"
  done
}

free_gb() {
  local folder=$exp
  while [[ ! -d $folder ]]; do folder=$(dirname "$folder"); done
  df -Pk "$folder" | awk 'NR == 2 { printf "%d", $4 / 1048576 }'
}

stage_0() { set_up "$exp/env.txt"; }

# set_up FILE: check this machine, and write down what it is.
set_up() {
  local -a check_arch=() needs=()
  if [[ $bpe == sentencepiece ]]; then
    needs=(--needs sentencepiece)
  elif [[ $source_lang == zh || $target_lang == zh ]]; then
    needs=(--needs jieba)
  fi
  [[ -z ${option_given[arch]-} ]] || $arch_known || check_arch=(--arch "$arch")
  run fairseq-deep doctor
  show python3 "$common/report.py" env --root "$root" --gpus "$ngpu" "${check_arch[@]}" "${needs[@]}" --out "$1"
}

used_gb() {
  local used
  used=$(du -sk "$exp" 2>/dev/null | cut -f 1)
  printf %s $((${used:-0} / 1048576))
}

print_plan() {
  local note=''
  ((product == batch_tokens)) || note=", the job has $(commas "$batch_tokens")"
  say "recipe   $task, $source_lang to $target_lang, $arch, conf ${conf:-none}, $precision"
  say "folder   $exp"
  say "data     $(data_words)"
  say "batch    $(batch_words "$update_freq")$note"
  ((nnodes == 1)) || say "machines $nnodes with $processes processes each; the first is ${master:-that of the job}"
  ((${#seed_list[@]} == 0)) || say "seeds    ${seed_list[*]}: one after the other, each in seedN of the folder"
  say "disk     about $disk_gb GB; $(free_gb) GB free"
  say "time     $(time_words)"
  warn_of_size
}

data_words() {
  case $route in
    demo) printf 'the built-in corpus' ;;
    folder) printf '%s' "$data" ;;
    tar) printf '%s' "$data_tar" ;;
    download)
      $multilingual || [[ -f $(description) ]] || { printf 'your own: --data DIR'; return 0; }
      printf 'fetched and rebuilt from its public parts%s' "${data_url:+ at $data_url}"
      ;;
  esac
}

# What cannot end well is said before the data are fetched: a job for GPUs on a CPU, or a large model for little text.
# The time is a rough estimate, on the low side: 6 operations for each parameter and token, 50 billion a second and core.
warn_of_size() {
  local parameters hours pairs
  ! $smoke && ((stage <= 4 && stop_stage >= 4)) || return 0
  parameters=$(rough_parameters)
  hours=$(awk -v p="$parameters" -v n="$(training_tokens)" -v c="$(cores)" 'BEGIN { printf "%d", 6 * p * n / 5e10 / c / 3600 }')
  [[ -z $(train_value --stop-time-hours) ]] || hours=0
  ((ngpu > 0 || hours < 48)) || say "warning  this CPU needs more than $(commas "$hours") hours for it: use a GPU, or for" \
    "your own text examples/own_text/run.sh"
  [[ $route == folder ]] || return 0
  pairs=$(count_pairs)
  ((pairs >= 100000 || parameters < 50000000)) || say "warning  $(commas "$pairs") training pairs are few for a model of" \
    "this size: examples/own_text/run.sh has smaller ones"
}

# Lines of the training text, plain or .gz; 100,000 if there are more.
count_pairs() {
  local file=$data/train.$target_lang
  [[ -f $file ]] || file+=.gz
  { gzip -cdf "$file" 2>/dev/null || true; } | head -n 100000 | wc -l
}

# By the layers and width in the architecture's name or in the flags.
rough_parameters() {
  local layers=6 decoder=6 width=512 ffn
  if [[ $arch =~ _([0-9]+)l(([0-9]+)l)? ]]; then
    layers=${BASH_REMATCH[1]} decoder=${BASH_REMATCH[3]:-6}
  fi
  [[ $arch != *_big* ]] || width=1024
  [[ $arch != *_tiny* ]] || width=64
  width=$(train_value_or --encoder-embed-dim "$width")
  ffn=$(train_value_or --encoder-ffn-embed-dim $((4 * width)))
  layers=$(train_value_or --encoder-layers "$layers")
  decoder=$(train_value_or --decoder-layers "$decoder")
  printf %s $(((layers * (4 * width + 2 * ffn) + decoder * (8 * width + 2 * ffn) + bpe_merges) * width))
}

train_value_or() {
  local value
  value=$(train_value "$1")
  printf %s "${value:-$2}"
}

# Target tokens that training reads, as far as the options tell; a sub-word has about 4 bytes.
training_tokens() {
  local total epochs bytes=0 file
  total=$(job_updates)
  if [[ -n $total ]]; then
    printf %s $((total * product))
    return
  fi
  epochs=$(train_value --max-epoch)
  for file in "$data/train.$target_lang" "$data/train.$target_lang.gz"; do
    [[ ! -f $file || $route != folder ]] || bytes=$(wc -c <"$file")
    [[ $file != *.gz ]] || bytes=$((3 * bytes))
  done
  printf %s $((${epochs:-0} * bytes / 4))
}

# Updates of the job; empty if only its epochs are known.
job_updates() {
  local total
  total=$(train_value --max-update)
  [[ -n $total ]] || ((updates == 0)) || total=$updates
  printf %s "$total"
}

# Arithmetic only: what the speed will be, the first lines of progress say.
time_words() {
  local hours total
  ((${#seed_list[@]} == 0)) || printf 'each seed: '
  hours=$(train_value --stop-time-hours)
  total=$(job_updates)
  if [[ -n $hours ]]; then
    awk -v h="$hours" 'BEGIN { printf "training ends after %.0f minutes at the latest", 60 * h }'
  elif [[ -n $total ]]; then
    awk -v u="$total" -v p="$product" '
      function lasts(seconds) {
        return seconds < 5400 ? sprintf("%d min", seconds / 60 + 1) : sprintf("%.0f h", seconds / 3600)
      }
      BEGIN { n = u * p; printf "%d updates = %.*f million tokens: %s at 100,000 tokens/s, %s at 10,000, %s at 1,000", u,
        n < 1e7, n / 1e6, lasts(n / 1e5), lasts(n / 1e4), lasts(n / 1e3) }'
  else
    printf 'training ends after %s epochs; every line of progress says how much is left' "$(train_value --max-epoch)"
  fi
}

# prepare_experiment ARG...: the folder, the command that made it, and how to go on.
prepare_experiment() {
  (($(free_gb) + $(used_gb) >= disk_gb)) || die "$exp: $(free_gb) GB free, about $disk_gb GB needed:" \
    "choose a larger disk with --exp, or lower --disk-gb if you know better"
  local -a kept others
  mkdir -p "$exp/logs" || die "cannot write to $exp: choose another folder with --exp"
  take_lock "$exp/.lock"
  check_port
  watch_peers
  ((stage == 0)) || forget "$stage"
  use_cores
  write_command "$exp/cmd.sh" "$(quote "$@")"
  without_options 'stage|stop.stage|node.rank' "$@"  # the markers know what is done
  write_command "$exp/resume.sh" "$(quote "${kept[@]}") \"\$@\" $(quote "${others[@]}")"
}

# take_lock FILE: held by this script and by what it starts.
take_lock() {
  exec 8>>"$1"
  python3 "$common/lock.py" 8 "$exp" "$1" || exit 2
}

use_cores() {
  ((ngpu == 0)) || return 0
  local each=$(($(cores) / processes))
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((each > 0 ? each : 1))}
  spin_shortly
}

this_script() { say "$(cd "$(dirname "$0")" && pwd)/${0##*/}"; }

# write_command FILE WORDS: a script that calls this one with WORDS, which are quoted.
write_command() {
  {
    say '#!/usr/bin/env bash'
    quote cd "$PWD"
    [[ -z ${FAIRSEQ_DEEP_ENV-} ]] || quote export "FAIRSEQ_DEEP_ENV=$FAIRSEQ_DEEP_ENV"
    say "$(quote exec "$(this_script)") $2"  # so that a signal to this file's shell reaches it
  } >"$1.new"
  chmod +x "$1.new"
  mv "$1.new" "$1"
}

# without_options PATTERN WORDS...: `kept` are those before a lone --, without options (and values) of these names, and
# `others` what is left.
without_options() {
  local names=$1
  shift
  kept=() others=()
  while (($#)) && [[ $1 != -- ]]; do
    if [[ $1 =~ ^--($names)(=.*)?$ ]]; then
      [[ -n ${BASH_REMATCH[2]} ]] || shift
    else
      kept+=("$1")
    fi
    shift
  done
  others=("$@")
}
