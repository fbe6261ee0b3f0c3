# shellcheck shell=bash disable=SC2154,SC2034  # options and settings are shared between the sourced files
# Stages 1 to 3: get and check the text, tokenise and cut it into sub-words, binarise it.

resolve_route() {
  local given=0
  [[ -n $data ]] && given=$((given + 1))
  [[ -n $data_tar ]] && given=$((given + 1))
  $demo && given=$((given + 1))
  ((given <= 1)) || die "--data, --data-tar and --demo exclude each other: give one"
  route=download
  $demo && route=demo
  [[ -n $data_tar ]] && route=tar
  [[ -n $data ]] && route=folder
  if [[ $max_words == auto ]]; then
    max_words=250
    [[ $route != download ]] || max_words=$download_max_words
  fi
  [[ $route != tar || -f $data_tar ]] || die "--data-tar $data_tar: no such file"
  [[ $route != folder ]] || check_folder
  $dry_run || $multilingual || [[ $route != download || -f $(description) ]] ||
    die "there is no public archive of $task (no $(description)): give your own text with --data DIR"
}

check_folder() {
  if $multilingual; then
    [[ -d $data/supervised ]] || die "--data $data: there is no supervised/XX-YY in it, as OPUS-100 has"
    return 0
  fi
  local split lang
  local -a splits=(train valid test)
  [[ $subsets == none ]] || mapfile -t splits < <(printf '%s\n' train valid test "${subsets//,/$'\n'}" | sort -u)
  [[ -d $data ]] || die "--data $data: no such folder"
  [[ ! -d $exp/text || $(cd "$data" && pwd -P)/ != "$(cd "$exp/text" && pwd -P)"/* ]] ||
    die "--data $data is where --exp $exp keeps its own copy of the text: give the folder that it came from"
  for split in "${splits[@]}"; do
    for lang in "$source_lang" "$target_lang"; do
      [[ -f $data/$split.$lang || -f $data/$split.$lang.gz ]] ||
        die "$data/$split.$lang is missing: --data needs $(commas_of "${splits[@]}").{$source_lang,$target_lang}, plain or .gz (of the test sets, those of --subsets)$(languages_there)"
    done
  done
}

# The languages of the training text in --data, where they are others than those asked for.
languages_there() {
  local file
  local -a other=()
  for file in "$data"/train.*; do
    file=${file##*/train.}
    file=${file%.gz}
    [[ $file == "$source_lang" || $file == "$target_lang" || ! $file =~ ^[a-z]{2,3}([_-][A-Za-z]+)?$ ]] || other+=("$file")
  done
  ((${#other[@]} == 0)) || printf '; it has %s: give --source-lang and --target-lang' "${other[*]}"
}

# {a,b,c}
commas_of() {
  local IFS=,
  printf '{%s}' "$*"
}

data_fingerprint() {
  case $route in
    folder)
      if $multilingual; then
        say "$temperature"
        (cd "$data" && find supervised zero-shot -name 'opus.*' -exec wc -c {} + 2>/dev/null | sort | cksum || true)
        return 0
      fi
      (cd "$data" && cksum {train,valid,test}.{"$source_lang","$target_lang"}{,.gz} \
      test[1-9]*."$source_lang"{,.gz} test[1-9]*."$target_lang"{,.gz} "test"*".$target_lang.ref"[0-9]* 2>/dev/null || true)
      ;;
    tar) cksum <"$data_tar" ;;
    demo) cat "$examples"/demo/make_corpus.py "$examples"/demo/grammar/*.py | cksum ;;
    download)
      say "$data_url"
      ! $multilingual || say "$temperature"
      [[ $corpus == corpus ]] || say "$corpus"
      ;;
  esac
}

# Of the corpus that is fetched where no data is given.
description() { printf %s "$examples/$task/$corpus.json"; }

stage_1() {
  local langs=(--source-lang "$source_lang" --target-lang "$target_lang")
  if $multilingual; then
    show python3 "$common/pairs.py" prepare --data "$data" --url "$data_url" --checksums "$checksums" \
      --archives "$exp/download" --corpus "$exp/corpus" --temperature "$temperature" --out "$exp/text/raw"
    return
  fi
  case $route in
    demo)
      run python3 "$examples/demo/make_corpus.py" --out "$exp/corpus"
      show python3 "$common/corpus.py" "${langs[@]}" --data "$exp/corpus" --out "$exp/text/raw" --route demo
      ;;
    folder)
      show python3 "$common/corpus.py" "${langs[@]}" --data "$data" --out "$exp/text/raw" --route "$data"
      ;;
    tar)
      show python3 "$common/wmt16_tar.py" "${langs[@]}" --tar "$data_tar" --out "$exp/text" --sha256 "$data_sha256" \
        --lines "$data_lines"
      ;;
    download)
      [[ -f $(description) ]] || { say "# there is no public archive: --data DIR"; return 0; }
      show python3 "$common/rebuild.py" --corpus "$(description)" "${langs[@]}" --url "$data_url" --checksums "$checksums" \
        --archives "$exp/download" --out "$exp/corpus"
      show python3 "$common/corpus.py" "${langs[@]}" --data "$exp/corpus" --out "$exp/text/raw" --route download
      ;;
  esac
}

stage_2() {
  if [[ $route == tar ]]; then
    say "  the archive holds sub-words already: nothing to do"
    return
  fi
  need "$exp/text/raw"
  local -a cased=()
  $lowercase && cased=(--lowercase)
  show python3 "$common/subwords.py" --source-lang "$source_lang" --target-lang "$target_lang" --text "$exp/text/raw" \
    --out "$exp/text/bpe" --bpe "$bpe" --merges "$bpe_merges" --max-words "$max_words" --max-subwords "$max_subwords" \
    --workers "$workers" "${cased[@]}"
}

# The prefixes of all test sets, separated by commas, as fairseq-preprocess wants them: test, test1, test2 ...
test_prefixes() {
  local n found=$1/test
  for ((n = 1; ; n++)); do
    if $dry_run; then [[ ,$subsets, == *,test$n,* ]] || break; else [[ -e $1/test$n.$source_lang ]] || break; fi
    found+=,$1/test$n
  done
  printf %s "$found"
}

stage_3() {
  local prefix=$exp/text/bpe
  local -a joined=(--joined-dictionary)
  [[ $bpe != per-side ]] || joined=()
  need "$prefix"
  run_quietly rm -rf "$exp/data-bin.new"
  run fairseq-preprocess --source-lang "$source_lang" --target-lang "$target_lang" "${joined[@]}" \
    --trainpref "$prefix/train" --validpref "$prefix/valid" --testpref "$(test_prefixes "$prefix")" \
    --thresholdsrc "$vocab_threshold" --thresholdtgt "$vocab_threshold" --workers "$workers" --destdir "$exp/data-bin.new"
  run_quietly rm -rf "$exp/data-bin"
  run_quietly mv "$exp/data-bin.new" "$exp/data-bin"
}
