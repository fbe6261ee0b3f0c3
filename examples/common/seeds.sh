# shellcheck shell=bash disable=SC2154,SC2034  # options and settings are shared between the sourced files
# Several seeds: the text once, in the folder of the experiment, and a training for each seed in its sub-folder seedN.

# --seeds 3 are the seeds 1 to 3; with a comma it is a list.
resolve_seeds() {
  local n
  local -A seen=()
  seed_list=()
  if [[ -z $seeds ]]; then
    ((stop_stage < 4)) || ! holds_seeds "$exp" || die "$exp holds several seeds: give --seeds, or another --exp"
    return 0
  fi
  [[ -z ${option_given[seed]-} ]] || die "--seed and --seeds exclude each other: give one"
  if [[ $seeds =~ ^[1-9][0-9]{0,2}$ ]]; then
    for ((n = 1; n <= seeds; n++)); do seed_list+=("$n"); done
  elif [[ $seeds =~ ^(0|[1-9][0-9]*)(,(0|[1-9][0-9]*))+$ ]]; then
    IFS=, read -r -a seed_list <<<"$seeds"
  else
    die "--seeds takes how many, such as 3, or a list such as 4,7, not '$seeds'"
  fi
  for n in "${seed_list[@]}"; do
    [[ -z ${seen[$n]-} ]] || die "--seeds $seeds names seed $n twice"
    seen[$n]=1
  done
  [[ ! -e $exp/checkpoints ]] || die "$exp holds a training of one seed: use another --exp"
  [[ -n ${option_given[disk_gb]-} ]] || disk_gb=$((disk_gb * ${#seed_list[@]}))
}

holds_seeds() { compgen -G "$1/seed[0-9]*/checkpoints" >/dev/null || compgen -G "$1/seed[0-9]*/test.hyp.*" >/dev/null; }

# What --against names must be there before anything is trained.
resolve_against() {
  [[ -n $against ]] || return 0
  [[ $subsets != none ]] || die "--against compares translations, and --subsets none makes none: drop one of them"
  [[ -e $against ]] || die "--against $against: no such run or file"
  local n
  local -a runs=("$against")
  if [[ -d $against ]] && holds_seeds "$against"; then
    ((${#seed_list[@]} > 0)) || die "--against $against holds several seeds: give one of them, such as $against/seed1"
    runs=("${seed_list[@]/#/$against/seed}")
  fi
  for n in "${runs[@]}"; do
    [[ -f $(hypotheses_of "$n") ]] || die "--against: there is no $(hypotheses_of "$n"): that run has to come to its end first"
  done
  [[ ! $against -ef $exp ]] || die "--against $against is this run itself: give another one"
}

# enter_seed N, in a sub-shell: from here on the folder and all settings are those of this seed.
enter_seed() {
  seed=$1
  exp=$home/seed$1
  [[ -z $against || ! -d $against/seed$1 ]] || against=$against/seed$1
  build_train_command
  compute_keys
}

refuse_changed_runs() {
  local n
  ((${#seed_list[@]} > 0)) || refuse_changed_run
  for n in "${seed_list[@]}"; do
    (enter_seed "$n" && refuse_changed_run) || exit 2
  done
}

# The common text, found in the folder of the seed as if it had been made there.
link_text() {
  local part n
  mkdir -p "$exp/logs"
  for part in text data-bin; do
    [[ -L $exp/$part ]] || ln -s "../$part" "$exp/$part"
  done
  for part in env.txt .done.{0..3}; do
    [[ ! -f $home/$part ]] || cp "$home/$part" "$exp/$part"
  done
}

run_seed() {
  local first=$((stage > 4 ? stage : 4))
  if ! $dry_run; then
    link_text
    ((stage == 0)) || forget "$first"
  fi
  run_stages "$first" "$stop_stage"
  ((stop_stage == 7)) || return 0
  if $dry_run; then
    report_result
  else
    report_result >/dev/null || exit 2
    say "seed $seed: $(grep -a -e '^BLEU' -e '^  valid ppl' "$exp/logs/result.log" | tail -n 1)"
  fi
}

train_seed() {
  enter_seed "$1"
  run_seed
}

# A seed that fails leaves the others alone; bad input, which would stop each of them, and Ctrl-C end it all.
run_seeds() {
  local n status log=$exp/logs/result.log
  local -a good=() failed=()
  trap 'exit 130' INT
  for n in "${seed_list[@]}"; do
    say "seed $n"
    set +e
    attend train_seed "$n"
    status=$?
    trap 'exit 130' INT
    set -e
    case $status in
      0) good+=("$n") ;;
      2 | 130) exit "$status" ;;
      143) exit 130 ;;
      *) failed+=("$n") ;;
    esac
  done
  if ((stop_stage == 7)); then
    $dry_run || rm -f "$exp/RESULT.json"
    ((${#good[@]} == 0)) ||
      show python3 "$common/seeds.py" --exp "$exp" --seeds "${good[@]}" --failed "${failed[@]}" || exit 2
  fi
  ((${#failed[@]} == 0)) || exit 1
}
