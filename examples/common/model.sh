# shellcheck shell=bash disable=SC2154,SC2034  # options and settings are shared between the sourced files
# Stages 4 to 7: train, average checkpoints, translate, score.

share_flag() {
  if [[ $embeddings == all ]]; then say --share-all-embeddings; else say --share-decoder-input-output-embed; fi
}

# With --average-updates, checkpoints of every so many updates take the place of those of the epochs.
resolve_average() {
  save_flags=()
  ((average_updates > 0)) || return 0
  local word
  ((average > 1)) || die "--average-updates $average_updates with --average $average: there is nothing to average;" \
    "raise --average, or leave --average-updates out"
  for word in "${conf_flags[@]}" "${extra_flags[@]}"; do
    case ${word%%=*} in
      --save-interval-updates | --keep-interval-updates | --keep-interval-updates-pattern | --no-save)
        die "${word%%=*} clashes with --average-updates $average_updates, which decides what is saved: drop one of them"
        ;;
    esac
  done
  save_flags=(--save-interval-updates "$average_updates" --keep-interval-updates "$average" --no-epoch-checkpoints)
}

# Numbers that the plan counts with.
check_train_numbers() {
  local flag value
  for flag in --max-update --max-epoch --{encoder,decoder}-layers --encoder-{,ffn-}embed-dim; do
    value=$(train_value "$flag")
    [[ -z $value ]] || check_value "$flag" int "$value"
  done
}

check_average_updates() {
  local last
  last=$(train_value --max-update)
  [[ -z $last ]] || $smoke || ((average_updates <= last)) ||
    die "--average-updates $average_updates: training ends after $last updates; choose fewer"
}

check_embeddings() {
  [[ $bpe != per-side || $embeddings == target ]] ||
    die "--bpe per-side makes a dictionary for each side, which --embeddings all cannot share: add --embeddings target"
  [[ $bpe == joint || $route != tar ]] || die "the text of --data-tar has a joint BPE: leave out --bpe $bpe"
}

build_train_command() {
  local device=(--distributed-world-size "$devices")
  ((ngpu > 0)) || device=(--cpu)
  ((ngpu > 0 || devices == 1)) || device+=(--distributed-backend gloo)
  [[ $precision == fp32 ]] || device+=("--$precision")
  train_command=(fairseq-train "$exp/data-bin" --user-dir "$root/fairseq_deep" --task translation
    --source-lang "$source_lang" --target-lang "$target_lang" --arch "$arch" "$(share_flag)" "${conf_flags[@]}"
    --max-tokens "$max_tokens" --update-freq "$update_freq" --seed "$seed" "${device[@]}"
    --save-dir "$exp/checkpoints" --log-format json "${save_flags[@]}" "${smoke_flags[@]}" "${extra_flags[@]}")
}

# The value that fairseq-train will see: the last one given.
train_value() {
  local flag=$1 value='' i
  for ((i = 0; i < ${#train_command[@]}; i++)); do
    case ${train_command[i]} in
      "$flag") value=${train_command[i + 1]-} ;;
      "$flag="*) value=${train_command[i]#*=} ;;
    esac
  done
  printf %s "$value"
}

# Beside its command, in train.sh, what a training run may not change half-way; recorded when it begins.
run_record() {
  say "$arch"
  say "$devices $max_tokens $update_freq"
  say "${stage_keys[3]}"
  say "$devices $device_name$( ((nnodes == 1)) || printf ' on %s machines' "$nnodes")"
}

refuse_changed_run() {
  ((stage <= 4)) && [[ -f $exp/checkpoints/checkpoint_last.pt && -f $exp/trained-with.txt ]] || return 0
  local -a before now old
  mapfile -t before <"$exp/trained-with.txt"
  mapfile -t now < <(run_record)
  [[ ${before[0]} == "${now[0]}" ]] || die "$exp holds a ${before[0]} model, not a $arch one: use another --exp"
  [[ ${before[2]} == "${now[2]}" ]] ||
    die "$exp holds a model trained on other data, or text cut in another way: use another --exp," \
      "or delete $exp/checkpoints to train anew"
  python3 "$common/settings.py" --before "$exp/train.sh" --exp "$exp" -- "${train_command[@]}" || exit 2
  [[ ${before[1]} == "${now[1]}" ]] || $force_batch || {
    read -r -a old <<<"${before[1]}"
    die "$exp was trained with ${old[0]} device(s) x ${old[1]} tokens x update-freq ${old[2]}," \
      "now it would be $devices x $max_tokens x $update_freq: go on with the same, use another --exp," \
      "or change it on purpose with --force-batch true"
  }
}

stage_4() {
  need "$exp/data-bin"
  local progress_flags=(--mode train --jsonl "$exp/train.jsonl" --max-epoch "$(train_value --max-epoch)"
    --max-update "$(train_value --max-update)" --stop-hours "$(train_value --stop-time-hours)")
  if ! $dry_run; then
    check_lengths
    check_port
    # what is trained anew is not the training whose record lies there
    [[ -f $exp/checkpoints/checkpoint_last.pt || ! -f $exp/train.jsonl ]] || mv "$exp/train.jsonl" "$exp/train.before.jsonl"
    run_record >"$exp/trained-with.txt"
    quote "${train_command[@]}" >"$exp/train.sh"
  fi
  start_training
  $dry_run || [[ -f $exp/checkpoints/checkpoint_last.pt ]] || {
    say "fairseq-train ended without a checkpoint" >>"$log"
    return 1
  }
}

# fairseq stops at a sentence longer than the batch, or than the positions of the model, when it comes to it.
check_lengths() {
  local side value
  local -a positions=()
  for side in source target; do
    value=$(train_value "--max-$side-positions")
    positions+=("${value:-1024}")
  done
  python3 "$common/corpus.py" --lengths "$exp/text/bpe" --source-lang "$source_lang" --target-lang "$target_lang" \
    --max-tokens "$max_tokens" --positions "${positions[@]}"
}

# Those of the epochs, or those of every so many updates.
count_checkpoints() {
  local files=("$exp"/checkpoints/checkpoint[0-9]*.pt)
  ((average_updates == 0)) || files=("$exp"/checkpoints/checkpoint_[0-9]*_[0-9]*.pt)
  [[ -e ${files[0]} ]] && printf %s "${#files[@]}" || printf 0
}

stage_5() {
  need "$exp/checkpoints/checkpoint_last.pt"
  local wanted=$average found=$average choice=--last
  ((average_updates == 0)) || choice=--last-updates
  $dry_run || found=$(count_checkpoints)
  if ((found == 0 && average_updates > 0)) && ! $smoke; then
    printf 'error: no checkpoint of every %s updates (--average-updates) in %s: train in another --exp with fewer, or %s\n' \
      "$average_updates" "$exp/checkpoints" "take the last checkpoint with --average-updates 0" >&2
    return "$exit_bad_input"
  fi
  ((wanted <= found)) || wanted=$found
  if ((wanted <= 1)); then
    say "  one checkpoint, nothing to average: taking the last one"
    run_quietly cp "$exp/checkpoints/checkpoint_last.pt" "$exp/averaged.pt"
    $dry_run || say 1 >"$exp/averaged.txt"
    return
  fi
  ((wanted == average)) || say "  only $wanted checkpoints exist: averaging these"
  run fairseq-deep average "$choice" "$wanted" --dir "$exp/checkpoints" --output "$exp/averaged.pt"
  $dry_run || say "$wanted" >"$exp/averaged.txt"
}

stage_6() {
  need "$exp/averaged.pt"
  need "$exp/data-bin"
  local subset device=() pieces=(--remove-bpe) task_flags=(--task translation)
  [[ $subsets != none ]] || return 0
  ((ngpu > 0)) || device=(--cpu)
  [[ $bpe != sentencepiece ]] || pieces+=(sentencepiece)
  [[ $decode_precision == fp32 ]] || task_flags=(--task deep_translation --decode-precision "$decode_precision")
  ! $gnmt_lenpen || task_flags=(--task deep_translation "${task_flags[@]:2}" --gnmt-lenpen)
  for subset in ${subsets//,/ }; do
    need "$exp/text/bpe/$subset.$source_lang"
    local progress_flags=(--mode generate --total "$exp/text/bpe/$subset.$source_lang" --out "$exp/generate-$subset.txt")
    run fairseq-generate "$exp/data-bin" --user-dir "$root/fairseq_deep" "${task_flags[@]}" \
      --source-lang "$source_lang" --target-lang "$target_lang" --path "$exp/averaged.pt" --gen-subset "$subset" \
      --beam "$beam" --lenpen "$lenpen" --max-len-a "$max_len_a" --max-len-b "$max_len_b" --batch-size "$gen_batch" \
      "${pieces[@]}" "${device[@]}"
  done
}

# The references beside the first one: SUBSET.LANG.ref1 and so on. Before there is text, those of --data.
count_references() {
  local folder=$exp/text/raw
  ! $dry_run || [[ $route != folder ]] || folder=$data
  local -a files=("$folder/$1.$target_lang.ref"[0-9]*)
  [[ -e ${files[0]} && $1 == test* ]] && printf %s "${#files[@]}" || printf 0
}

# The file with the translations of --against: itself, or that of a run.
hypotheses_of() {
  if [[ -d $1 ]]; then say "$1/test.hyp.$target_lang"; else say "$1"; fi
}

# sacreBLEU against the plain reference where there is one; the other two measures compare tokens with tokens.
stage_7() {
  local subset plain number reference output other cased=()
  [[ $subsets != none ]] || return 0
  $lowercase && cased=(--lowercase)
  if $multilingual; then
    score_pairs "${cased[@]}"
    return
  fi
  for subset in ${subsets//,/ }; do
    output=$exp/generate-$subset.txt
    need "$output"
    plain=$exp/text/raw/$subset.$target_lang
    reference=(--references "$exp/$subset.ref.$target_lang")
    if $dry_run && [[ $route != tar ]] || [[ -f $plain ]]; then reference+=(--ref "$plain"); fi
    for ((number = 1; number <= $(count_references "$subset"); number++)); do
      reference+=(--references "$exp/$subset.ref$number.$target_lang" --ref "$plain.ref$number")
    done
    $dry_run || while [[ -f $exp/$subset.ref$number.$target_lang ]]; do  # of text that had more of them
      rm "$exp/$subset.ref$number.$target_lang"
      number=$((number + 1))
    done
    other=()
    [[ $subset != test || -z $against ]] || other=(--against "$against")
    run fairseq-deep score --generate-output "$output" --detokenize "$target_lang" "${cased[@]}" \
      --hypotheses "$exp/$subset.hyp.$target_lang" "${reference[@]}" "${other[@]}" --json "$exp/score-$subset.json"
    run fairseq-deep score --generate-output "$output" --tokenized "${cased[@]}" --json "$exp/score-$subset-tokenized.json"
    run fairseq-deep score --generate-output "$output" --compound-split "${cased[@]}" \
      --json "$exp/score-$subset-compound-split.json"
  done
}

# Of many pairs: each by itself, then the means.
score_pairs() {
  local -a other=()
  [[ -z $against ]] || other=(--against "$against/pairs")
  need "$exp/generate-test.txt"
  show python3 "$common/pairs.py" split --generate-output "$exp/generate-test.txt" --text "$exp/text/raw" --out "$exp/pairs"
  show fairseq-deep score --multilingual "$exp/pairs" "$@" "${other[@]}" --json "$exp/score-test.json"
}

report_result() {
  local log=$exp/logs/result.log averaged=$average
  [[ ! -f $exp/averaged.txt ]] || averaged=$(<"$exp/averaged.txt")  # there may have been fewer
  show python3 "$common/report.py" result --exp "$exp" --subsets "$subsets" \
    --source-lang "$source_lang" --target-lang "$target_lang" \
    --set task="$task" --set conf="$conf" --set beam="$beam" --set lenpen="$lenpen" --set gnmt_lenpen="$gnmt_lenpen" \
    --set max_len_a="$max_len_a" --set max_len_b="$max_len_b" \
    --set averaged="$averaged" --set average_updates="$average_updates" --set smoke="$smoke"
}
