"""What a recipe can be asked for."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .options import (
    AUTO,
    AUTO_COUNT,
    COUNT,
    FILE,
    FOLDER,
    NUMBER,
    SUBSETS,
    SWITCH,
    TEXT,
    WHOLE,
    Options,
    one_of,
    option,
)

PRECISIONS = one_of("fp32", "fp16", "bf16", "amp")


@dataclass
class Recipe(Options):
    """The options of a recipe; those without a help text are for conf files and scripts."""

    show_config: bool = option(False, SWITCH, "print all options with their final values and stop")
    dry_run: bool = option(False, SWITCH, "print every command and change nothing")
    demo: bool = option(False, SWITCH, "the small built-in corpus and model, no GPU needed")
    exp: str = option("auto", FOLDER, "folder of the experiment; auto: exp/TASK-CONF in the repository")
    data: str = option("", FOLDER, "folder with parallel text {train,valid,test}.{SRC,TGT}, plain or .gz")
    data_tar: str = option("", FILE, "Google's pre-processed wmt16_en_de.tar.gz")
    data_sha256: str = option("", TEXT, "sha256 that --data-tar must have")
    data_lines: str = option("train=4400000-4600000,valid=3000,test=3003", TEXT,
                             "line counts that --data-tar must have (empty: any)")  # fmt: skip
    corpus: str = option("corpus", TEXT, "description of the corpus to fetch, examples/TASK/NAME.json")
    data_url: str = option(os.environ.get("WMT_URL", ""), TEXT,
                           "folder, also file://, to take all archives from instead of their home")  # fmt: skip
    checksums: str = option("", FILE, "file of sha256 sums ('SUM  NAME') of the archives, or none (default: ours)")
    teacher: str = option("", FILE, "trained model (run, checkpoint or package) whose translations replace the "
                          "references of the training text")  # fmt: skip
    conf: str = option("", TEXT, "flag files conf/NAME.args, in order, separated by commas")
    arch: str = option("", TEXT, "architecture (fairseq-deep archs lists them)")
    ngpu: int | str = option("auto", AUTO, "GPUs to use, on each machine; 0: the CPU; auto: all that are visible")
    cpu_processes: int = option(1, COUNT, "processes with --ngpu 0, on each machine")
    nnodes: int | str = option("auto", AUTO_COUNT, "machines; auto: those of the SLURM step, or one")
    node_rank: int | str = option("auto", AUTO, "number of this machine, from 0; auto: SLURM's")
    master: str = option("", TEXT, "HOST or HOST:PORT of machine 0 (port 29500); empty: SLURM's first")
    wait_hours: str = option("24", NUMBER, "how long the other machines wait for machine 0 to prepare the data")
    sbatch: str = option("", FILE, "write a batch script for SLURM to this file, and run nothing")
    max_tokens: int = option(4096, COUNT, "tokens per device and step")
    update_freq: int | str = option("auto", AUTO_COUNT, "steps per update; auto: so that the product is --batch-tokens")
    batch_tokens: int = option(65536, COUNT, "published product devices x max-tokens x update-freq")
    force_batch: bool = option(False, SWITCH, "accept another product, or another batch than the run began with")
    precision: str = option("fp32", PRECISIONS, "fp32, fp16, bf16 or amp")
    seed: int = option(1, WHOLE, "random seed")
    seeds: str = option("", TEXT, "train several seeds: 3 (that is 1, 2 and 3), or a list such as 4,7")
    embeddings: str = option("all", one_of("all", "target"),
                             "tables: one for all, or one of the source, one of target and output")  # fmt: skip
    bpe: str = option("joint", one_of("joint", "per-side", "sentencepiece"),
                      "sub-words: joint BPE, one for each side, or SentencePiece on the text as it is")  # fmt: skip
    bpe_merges: int = option(32000, WHOLE, "merges of the BPE; pieces of SentencePiece")
    vocab_threshold: int = option(5, WHOLE, "sub-words seen fewer times become unknown")
    temperature: str = option("5", NUMBER, "many pairs: small ones are repeated as if drawn with this temperature")
    max_words: int | str = option("auto", AUTO_COUNT,
                                  "longest training sentence in words; auto: 250, or the corpus's own")  # fmt: skip
    max_subwords: int = option(0, WHOLE, "longest training sentence in sub-words; 0: any")
    lowercase: bool = option(False, SWITCH, "lower-case the text")
    average: int = option(5, WHOLE, "last checkpoints to average")
    average_updates: int = option(0, WHOLE, "updates between the checkpoints to average; 0: those of the epochs")
    subsets: str = option("test", SUBSETS, "sets to translate and score: of valid, test, test1, test2 ..., or none")
    beam: int = option(4, COUNT, "beam width")
    lenpen: str = option("0.6", NUMBER, "length penalty")
    gnmt_lenpen: bool = option(False, SWITCH, "GNMT's length penalty, ((5 + length) / 6)^lenpen, not length^lenpen")
    max_len_a: str = option("1", NUMBER, "longest output: a x source length + b")
    max_len_b: int = option(50, WHOLE, "the b of it")
    against: str = option("", FILE, "run, or file of translations, to test the difference of BLEU and chrF to")
    decode_precision: str = option("fp32", one_of("fp32", "bf16", "int8"),
                                   "the decoder's matrix products when translating on the CPU")  # fmt: skip
    gen_batch: int = option(32, COUNT, "sentences per batch when translating")
    workers: int | str = option("auto", AUTO_COUNT, "processes for text work; auto: the number of cores")
    disk_gb: int = option(20, WHOLE, "free space asked for before the start, in GB")
    smoke: bool = option(False, SWITCH, "a few updates only, to see that every stage works")
    stage: int = option(0, WHOLE, "first stage to run, again even if it was done")
    stop_stage: int = option(7, WHOLE, "last stage to run")

    task: str = option("", TEXT)  # folder under examples/ with the conf files
    source_lang: str = option("en", TEXT)
    target_lang: str = option("de", TEXT)
    multilingual: bool = option(False, SWITCH)  # many pairs in one text, in the layout of OPUS-100
    download_max_words: int = option(250, WHOLE)  # --max-words for the fetched corpus
    arch_known: bool = option(False, SWITCH)  # who starts this has checked the name of the architecture
    same_text: str = option("", TEXT)  # hash of the text that it must be, as in another run's trained-with.txt
    updates: int = option(0, WHOLE)  # updates that the job takes, to estimate its time; 0: from --max-update
