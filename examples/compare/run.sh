#!/usr/bin/env bash
# shellcheck disable=SC2154  # the options are variables of option()
# Any list of architectures on the same text, updates and seeds: one table and one picture. The same command again does
# only what is missing.
#
#   examples/compare/run.sh --data DIR --seeds 3 --jobs 2 prenorm_6l dlcl_6l 'fixed=dlcl_6l --dlcl-fixed'
set -euo pipefail
unset CDPATH
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
common=$here/../common
for part in options run batch env; do
  # shellcheck source=/dev/null
  . "$common/$part.sh"
done
export PYTHONUTF8=1

# shellcheck disable=SC2034  # read by options.sh
argument_name="SYSTEM... (each NAME, 'NAME FLAGS' or 'LABEL=NAME FLAGS')"
option help bool false "show this text and stop"
option dry_run bool false "check everything, print what would be trained and change nothing"
option table_only bool false "train nothing: write table and picture of what is there"
option systems str '' "file with one system a line, after those of the command line"
option seeds str 1 "random seeds, every system with each: 3 (that is 1, 2 and 3), or a list such as 4,7"
option updates auto auto "updates of every training; auto: those of the size"
option jobs count 1 "trainings at the same time"
option exp str auto "folder of the experiment; auto: exp/compare-CONF in the repository"
option tables str '' "folder for table and picture; none: that of the experiment, and the table is printed, too"
option conf 'mini|base' mini "size: mini (width 128, a CPU) or base (width 512, a GPU)"
option width auto auto "width of all systems, feed-forward 4 x as wide; auto: that of the size; 0: each architecture's own"
option heads auto auto "attention heads; auto: those of the size, or width / 32 with --width"
option translate bool true "translate and score the test set with each; false: compare losses alone"
option bootstrap int 1000 "resamples of the paired bootstrap; 0: none"
option data str '' "folder with parallel text {train,valid,test}.{SRC,TGT}, plain or .gz"
option data_tar str '' "Google's pre-processed wmt16_en_de.tar.gz"
option demo bool false "the small built-in corpus"
option source_lang str en "language of the source"
option target_lang str de "language of the target"
option ngpu auto auto "GPUs of each training; 0: the CPU; auto: the visible ones, divided by --jobs"
option workers autocount auto "processes for text work; auto: the number of cores"
# options of the recipe that are passed on where they are given: their defaults are in conf/*.args and in the recipe
passed=(max_tokens update_freq batch_tokens force_batch precision embeddings bpe_merges vocab_threshold max_words average
  beam lenpen gen_batch disk_gb)
option max_tokens auto auto "tokens per device and step; auto: those of the size"
option update_freq auto auto "steps per update; auto: so that the tokens per update are those of the size"
option batch_tokens auto auto "tokens per update; auto: those of the size"
option force_batch bool false "accept other tokens per update than those of the size"
option precision 'fp32|fp16|bf16|amp' fp32 "fp32, fp16, bf16 or amp"
option embeddings 'all|target' all "tables: one for all, or one of the source, one of target and output"
option bpe_merges auto auto "merges of the joint BPE; auto: those of the size"
option vocab_threshold int 0 "sub-words seen fewer times become unknown"
option max_words count 250 "longest training sentence in words"
option average auto auto "last epochs to average; auto: those of the size (1: the last checkpoint alone)"
option beam count 4 "beam width"
option lenpen num 0.6 "length penalty"
option gen_batch count 32 "sentences per batch when translating"
option disk_gb auto auto "free space asked for before the start, in GB; auto: that of the size"

resolve() {
  local name
  [[ -n $data || -n $data_tar || $demo == true ]] ||
    die "--data is missing: a folder with {train,valid,test}.{$source_lang,$target_lang}, plain or .gz (or --demo)"
  [[ $exp != auto ]] || exp=$(cd "$here/../.." && pwd)/exp/compare-$conf
  [[ $exp == /* ]] || exp=$PWD/$exp
  recipe=(--conf "$conf" --source-lang "$source_lang" --target-lang "$target_lang")
  for name in data data_tar workers "${passed[@]}"; do
    [[ -z ${option_given[$name]-} || ${!name} == auto ]] || recipe+=("$(flag_of "$name")" "${!name}")
  done
  ! $demo || recipe+=(--demo true)
  $translate || recipe+=(--subsets none)
}

main() {
  local -a recipe
  local devices threads
  parse_options user "$@"
  if $help; then
    help=false
    usage "$0"
    return
  fi
  resolve
  devices=$(detect_gpus)
  if [[ ${devices:-0} == 0 || $ngpu == 0 ]]; then
    # one thread for each core, shared by the trainings that run at the same time
    threads=$(($(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || printf 1) / jobs))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
    spin_shortly
  fi
  ensure_env >&2
  export PYTHONPATH=$common${PYTHONPATH:+:$PYTHONPATH}
  # three lists, each after its length
  exec python3 "$here/compare.py" --exp "$exp" --conf "$conf" --seeds "$seeds" --updates "$updates" --width "$width" \
    --heads "$heads" --jobs "$jobs" --ngpu "$ngpu" --devices "${devices:-0}" --bootstrap "$bootstrap" \
    --dry-run "$dry_run" --table-only "$table_only" --tables "$tables" --file "$systems" \
    -- "${#recipe[@]}" "${recipe[@]}" "${#extra_flags[@]}" "${extra_flags[@]}" "${arguments[@]}"
}

main "$@"
