# shellcheck shell=bash disable=SC2154,SC2034  # options and settings are shared between the sourced files
# Running things: commands with log and progress, stages with markers, the experiment folder.

stage_names=(set-up data text binarise train average generate score)
exit_bad_input=65

# The words as a shell reads them, and Python's shlex, too, which knows nothing of the $'...' of printf %q.
quote() {
  local LC_ALL=C word line='' quoted="'\\''"
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9@%+=:,./_-]+$ ]] || word="'${word//\'/"$quoted"}'"
    line+=" $word"
  done
  (($# == 0)) || printf '%s\n' "${line# }"
}

say() { printf '%s\n' "$*"; }

# run CMD...: its output goes to the log of the stage, signs of life come here; --dry-run only shows the command. It ends
# with this script, and with the process RECIPE_OWNER that started several of them.
run() {
  if $dry_run; then
    quote "$@"
  else
    attend exec python3 "$common/progress.py" --log "$log" --owner "$$${RECIPE_OWNER:+,$RECIPE_OWNER}" \
      "${progress_flags[@]}" -- "$@"
  fi
}

# attend CMD...: run it in a shell of its own, which ends at its first error, and return its status. SIGTERM and SIGUSR1
# are handed on to it; Ctrl-C, which it gets as well, does not end this shell before it. Traps of these are gone then.
attend() {
  local child status
  (
    set -e
    "$@"
  ) &
  child=$!
  trap : INT
  trap 'kill -TERM "$child" 2>/dev/null' TERM
  trap 'kill -USR1 "$child" 2>/dev/null' USR1
  # a signal ends a wait before the child has ended
  until wait "$child"; status=$?; ! kill -0 "$child" 2>/dev/null; do :; done
  trap - INT TERM USR1
  return "$status"
}

# show CMD...: a helper of ours whose few lines are meant for the screen as well as for the log.
show() {
  if $dry_run; then quote "$@"; else "$@" | tee -a "$log"; fi
}

need() {
  $dry_run || [[ -e $1 ]] || {
    printf 'error: stage %s needs %s: run the earlier stages first (leave --stage out)\n' "$current" "$1" >&2
    return "$exit_bad_input"
  }
}

# What a stage depends on; a marker with another key does not count.
stage_parts() {
  case $1 in
    0) say "$root" "$(uname -n)" "$ngpu" "${FAIRSEQ_DEEP_ENV-}" "$($arch_known || say "$arch")" "$(cksum <"$root/requirements.txt")" ;;
    1) say "$source_lang-$target_lang" "$route" "$data_tar" "$data_sha256" "$data_lines" "$(data_fingerprint)" ;;
    2)
      say "$bpe_merges" "$max_words" "$lowercase"
      [[ $bpe == joint ]] || say "$bpe"
      ((max_subwords == 0)) || say "$max_subwords sub-words"
      ;;
    3) say "$vocab_threshold" ;;
    4)
      say "$arch" "$devices" "$max_tokens" "$update_freq" "$precision" "$seed"
      say "$(share_flag)" "${conf_flags[@]}" "${smoke_flags[@]}" "${extra_flags[@]}"
      ((average_updates == 0)) || say "${save_flags[@]}"
      ;;
    5) say "$average" ;;
    6)
      say "$beam" "$lenpen" "$gen_batch" "$max_len_a" "$max_len_b" "$subsets"
      [[ $decode_precision == fp32 ]] || say "$decode_precision"
      ! $gnmt_lenpen || say gnmt
      ;;
    7)
      say score
      [[ ! -f $(hypotheses_of "$against") ]] || say "$against" "$(cksum <"$(hypotheses_of "$against")")"
      ;;
  esac
}

compute_keys() {
  local n previous=''
  stage_keys=()
  for n in "${!stage_names[@]}"; do
    stage_keys[n]=$( (say "$previous"; stage_parts "$n") | cksum)
    ((n == 0)) || previous=${stage_keys[n]}
  done
}

is_done() { [[ -f $exp/.done.$1 && $(<"$exp/.done.$1") == "${stage_keys[$1]}" ]]; }

# forget N: stage N and what was made from its result count as not done; nothing is made from stage 0.
forget() {
  local n last=$((${#stage_names[@]} - 1))
  (($1 > 0)) || last=0
  for ((n = $1; n <= last; n++)); do rm -f "$exp/.done.$n"; done
}

last_words() {
  local words
  words=$(grep -a -v '^[[:space:]]*$' "$log" 2>/dev/null | tail -n 1 | cut -c 1-300)
  printf %s "${words:-no output}"
}

resume_words() { quote "$home/resume.sh" ${option_given[node_rank]:+--node-rank "$node_rank"}; }

stopped() {
  printf 'stopped in stage %s (%s); to go on: %s\n' "$current" "${stage_names[current]}" "$(resume_words)" >&2
  exit 130
}

stage_failed() {
  local words
  (($1 == 130 || $1 == 143)) && stopped
  words=$(last_words)
  (($1 != exit_bad_input)) || words="stage $current (${stage_names[current]}) refused its input"
  tell_peers "$words"
  (($1 != exit_bad_input)) || exit 2
  printf 'error: stage %s (%s) failed: %s; log: %q; to go on once it is cured: %s\n' \
    "$current" "${stage_names[current]}" "$words" "$log" "$(resume_words)" >&2
  exit 1
}

# attempt N CMD...: a command of stage N; this script ends if it fails.
attempt() {
  local status
  current=$1
  trap stopped INT
  set +e
  attend "${@:2}"
  status=$?
  trap stopped INT
  set -e
  ((status == 0)) || stage_failed "$status"
}

run_stage() {
  local begun=$SECONDS
  log=$exp/logs/$1-${stage_names[$1]}.log
  if ! $dry_run && is_done "$1"; then
    say "stage $1 ${stage_names[$1]}: already done"
    return
  fi
  say "stage $1 ${stage_names[$1]}"
  $dry_run || forget "$1"
  attempt "$1" "stage_$1"
  $dry_run && return
  say "${stage_keys[$1]}" >"$exp/.done.$1"
  say "  done in $(duration $((SECONDS - begun)))"
}

run_stages() {
  local n
  for ((n = $1; n <= $2; n++)); do run_stage "$n"; done
}

duration() {
  local s=$1
  if ((s >= 3600)); then
    printf '%d h %02d min' $((s / 3600)) $((s % 3600 / 60))
  elif ((s >= 60)); then
    printf '%d min %02d s' $((s / 60)) $((s % 60))
  else
    printf '%d s' "$s"
  fi
}

run_quietly() {
  if $dry_run; then quote "$@"; else "$@"; fi
}
