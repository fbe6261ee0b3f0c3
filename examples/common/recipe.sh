# shellcheck shell=bash disable=SC2154,SC2034  # options and settings are shared between the sourced files
# From text to BLEU in resumable stages. A run_*.sh script sets the array `defaults` and sources this file with its arguments.
#
#   0 set-up   1 data   2 text   3 binarise   4 train   5 average   6 generate   7 score

if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
  printf 'error: bash 4.4 or newer is needed, this is %s: install it (macOS: brew install bash)\n' "$BASH_VERSION" >&2
  exit 2
fi

common="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
examples=${common%/common}
root=${examples%/examples}
export PYTHONUTF8=1

for part in options batch nodes run data model seeds prepare env; do
  # shellcheck source=/dev/null
  . "$common/$part.sh"
done

option help bool false "show this text and stop"
option dry_run bool false "print every command and change nothing"
option demo bool false "the small built-in corpus and model, no GPU needed"
option exp str auto "folder of the experiment; auto: exp/TASK-CONF beside this script"
option data str '' "folder with parallel text {train,valid,test}.{SRC,TGT}, plain or .gz"
option data_tar str '' "Google's pre-processed wmt16_en_de.tar.gz"
option data_sha256 str '' "sha256 that --data-tar must have"
option data_lines str train=4400000-4600000,valid=3000,test=3003 "line counts that --data-tar must have (empty: any)"
option corpus str corpus "description of the corpus to fetch, examples/TASK/NAME.json"
option data_url str "${WMT_URL:-}" "folder, also file://, to take all archives from instead of their home"
option checksums str '' "file of sha256 sums ('SUM  NAME') of the archives, or none (default: the known ones)"
option conf str '' "flag files conf/NAME.args, in order, separated by commas"
option arch str '' "architecture (fairseq-deep archs lists them)"
option ngpu auto auto "GPUs to use, on each machine; 0: the CPU; auto: all that are visible"
option cpu_processes count 1 "processes with --ngpu 0, on each machine"
option nnodes autocount auto "machines; auto: those of the SLURM step, or one"
option node_rank auto auto "number of this machine, from 0; auto: SLURM's"
option master str '' "HOST or HOST:PORT of machine 0 (port 29500); empty: SLURM's first"
option wait_hours num 24 "how long the other machines wait for machine 0 to prepare the data"
option sbatch str '' "write a batch script for SLURM to this file, and run nothing"
option max_tokens count 4096 "tokens per device and step"
option update_freq autocount auto "steps per update; auto: so that the product is --batch-tokens"
option batch_tokens count 65536 "published product devices x max-tokens x update-freq"
option force_batch bool false "accept another product, or another batch than the run began with"
option precision 'fp32|fp16|bf16|amp' fp32 "fp32, fp16, bf16 or amp"
option seed int 1 "random seed"
option seeds str '' "train several seeds: 3 (that is 1, 2 and 3), or a list such as 4,7"
option embeddings 'all|target' all "tables: one for all, or one of the source, one of target and output"
option bpe 'joint|per-side|sentencepiece' joint "sub-words: joint BPE, one for each side, or SentencePiece on the text as it is"
option bpe_merges int 32000 "merges of the BPE; pieces of SentencePiece"
option vocab_threshold int 5 "sub-words seen fewer times become unknown"
option temperature num 5 "many pairs: small ones are repeated as if drawn with this temperature"
option max_words autocount auto "longest training sentence in words; auto: 250, or that of the fetched corpus"
option max_subwords int 0 "longest training sentence in sub-words; 0: any"
option lowercase bool false "lower-case the text"
option average int 5 "last checkpoints to average"
option average_updates int 0 "updates between the checkpoints to average; 0: those of the epochs"
option subsets subsets test "sets to translate and score: of valid, test, test1, test2 ..., or none"
option beam count 4 "beam width"
option lenpen num 0.6 "length penalty"
option gnmt_lenpen bool false "GNMT's length penalty, ((5 + length) / 6)^lenpen, instead of length^lenpen"
option max_len_a num 1 "longest output: a x source length + b"
option max_len_b int 50 "the b of it"
option against str '' "run, or file of translations, to test the difference of BLEU and chrF to for significance"
option decode_precision 'fp32|bf16|int8' fp32 "the decoder's matrix products when translating on the CPU"
option gen_batch count 32 "sentences per batch when translating"
option workers autocount auto "processes for text work; auto: the number of cores"
option disk_gb int 20 "free space asked for before the start, in GB"
option smoke bool false "a few updates only, to see that every stage works"
option stage int 0 "first stage to run, again even if it was done"
option stop_stage int 7 "last stage to run"

# What a run_*.sh script or a conf file sets.
option task str '' ''              # folder under examples/ with the conf files
option source_lang str en ''
option target_lang str de ''
option multilingual bool false ''   # many pairs in one text, in the layout of OPUS-100
option download_max_words int 250 ''  # --max-words for the fetched corpus
option arch_known bool false ''   # who starts this has checked the name of the architecture
option same_text str '' ''        # sum over the text that it must be, as in another training's trained-with.txt
option updates int 0 ''            # updates that the job takes, for the estimate of its time; 0: from --max-update

main() {
  parse_options default "${defaults[@]}"
  parse_options user "$@"
  resolve_settings
  if $help; then
    help=false
    usage "$0"
    return
  fi
  print_plan
  if [[ -n $sbatch ]]; then
    write_sbatch "$@"
    return
  fi
  if ((node_rank > 0)); then
    join_training
    return
  fi
  if $dry_run; then
    say "$(quote ensure_env)  # makes .venv from requirements.txt"
  else
    prepare_experiment "$@"
    ensure_env
  fi
  if ((${#seed_list[@]} > 0)); then
    run_stages "$stage" "$((stop_stage < 3 ? stop_stage : 3))"
    ((stop_stage < 4)) || run_seeds
    return
  fi
  run_stages "$stage" "$stop_stage"
  ((stop_stage < 7)) || report_result || exit 2
}

main "$@"
