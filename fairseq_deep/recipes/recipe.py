"""The options of a recipe."""

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
class Shared(Options):
    """The options that recipes and comparisons have; options without a help text are for conf files and scripts."""

    dry_run: bool = option(False, SWITCH, "print all commands and change nothing")
    demo: bool = option(False, SWITCH, "use the small built-in corpus and model; no GPU required")
    exp: str = option("auto", FOLDER, "directory of the experiment; auto: exp/TASK-CONF in the repository")
    data: str = option("", FOLDER, "directory with parallel text {train,valid,test}.{SRC,TGT}, plain or .gz")
    teacher: str = option("", FILE, "trained model (run, checkpoint or package); its translations replace the "
                          "references of the training text")  # fmt: skip
    conf: str = option("", TEXT, "flag files conf/NAME.args, in order, separated by commas")
    ngpu: int | str = option("auto", AUTO, "GPUs per machine; 0: the CPU; auto: all visible GPUs")
    max_tokens: int = option(4096, COUNT, "tokens per device and step")
    update_freq: int | str = option("auto", AUTO_COUNT, "steps per update; auto: the product becomes --batch-tokens")
    batch_tokens: int = option(65536, COUNT, "published product devices x max-tokens x update-freq")
    force_batch: bool = option(False, SWITCH, "accept another product, or another batch size for a resumed run")
    precision: str = option("fp32", PRECISIONS, "fp32, fp16, bf16 or amp")
    seeds: str = option("", TEXT, "train several seeds: a number such as 3 (seeds 1, 2 and 3), or a list such as 4,7")
    jobs: int = option(1, COUNT, "number of simultaneous training runs; with --launcher slurm, all by default")
    launcher: str = option("local", one_of("local", "slurm"), "local: train on this machine; slurm: submit each "
                           "training run as a job")  # fmt: skip
    slurm: str = option("", TEXT, "options of sbatch for each job, such as 'partition=gpu account=lab'")
    slurm_hours: str = option("24", NUMBER, "time limit of a job in hours; an unfinished run is requeued")
    embeddings: str = option("all", one_of("all", "target"),
                             "shared embeddings: source, target and output, or target and output")  # fmt: skip
    bpe: str = option("joint", one_of("joint", "per-side", "sentencepiece"),
                      "sub-words: joint BPE, one BPE per side, or SentencePiece on untokenised text")  # fmt: skip
    bpe_merges: int = option(32000, WHOLE, "number of BPE merges or SentencePiece pieces")
    vocab_threshold: int = option(5, WHOLE, "minimum frequency of sub-words in the vocabulary")
    max_words: int | str = option("auto", AUTO_COUNT, "maximum length of training sentences in words; auto: 250, or "
                                  "the corpus's own limit")  # fmt: skip
    max_subwords: int = option(0, WHOLE, "maximum length of training sentences in sub-words; 0: no limit")
    lowercase: bool = option(False, SWITCH, "lowercase the text")
    average: int = option(5, WHOLE, "number of last checkpoints to average")
    beam: int = option(4, COUNT, "beam width")
    lenpen: str = option("0.6", NUMBER, "length penalty")
    gnmt_lenpen: bool = option(False, SWITCH, "use GNMT's length penalty, ((5 + length) / 6)^lenpen")
    max_len_a: str = option("1", NUMBER, "a of the maximum output length a x source length + b")
    max_len_b: int = option(50, WHOLE, "b of the maximum output length")
    decode_precision: str = option("fp32", one_of("fp32", "bf16", "int8"),
                                   "precision of linear layers when translating on the CPU")  # fmt: skip
    gen_batch: int = option(32, COUNT, "sentences per batch when translating")
    workers: int | str = option("auto", AUTO_COUNT, "processes for text preparation; auto: the number of cores")
    disk_gb: int = option(20, WHOLE, "required free disk space, in GB")
    task: str = option("", TEXT)  # directory under examples/ with the conf files
    source_lang: str = option("en", TEXT)
    target_lang: str = option("de", TEXT)


@dataclass
class Recipe(Shared):
    """The options of a recipe."""

    corpus: str = option("corpus", TEXT, "description of the corpus to download, examples/TASK/NAME.json")
    data_url: str = option(os.environ.get("WMT_URL", ""), TEXT,
                           "URL (also file://) of a directory with all archives, to use instead of their own "
                           "URLs")  # fmt: skip
    checksums: str = option("", FILE, "file with sha256 checksums ('SUM  NAME') of the archives, or none (default: "
                            "the repository's)")  # fmt: skip
    arch: str = option("", TEXT, "architecture (fairseq-deep archs lists them)")
    nnodes: int | str = option("auto", AUTO_COUNT, "number of machines; auto: as in the SLURM step, or one")
    node_rank: int | str = option("auto", AUTO, "rank of this machine, from 0; auto: SLURM's")
    master: str = option("", TEXT, "HOST or HOST:PORT of machine 0 (port 29500); empty: SLURM's first")
    wait_hours: str = option("24", NUMBER, "time limit for machine 0 to begin training, in hours")
    seed: int = option(1, WHOLE, "random seed")
    temperature: str = option("5", NUMBER, "sampling temperature of many pairs; small pairs are repeated accordingly")
    average_updates: int = option(0, WHOLE, "updates between checkpoints to average; 0: epoch checkpoints")
    subsets: str = option("test", SUBSETS, "sets to translate and score: of valid, test, test1, test2 ..., or none")
    against: str = option("", FILE, "run or file of translations to compare with, by significance tests of BLEU "
                          "and chrF")  # fmt: skip
    start_from: str = option("", FILE, "start with the text and the weights of this run of the same recipe")
    stage: int = option(0, WHOLE, "first stage to run, even if it is done")
    stop_stage: int = option(7, WHOLE, "last stage to run")
    multilingual: bool = option(False, SWITCH)  # many pairs in one text, in the layout of OPUS-100
    download_max_words: int = option(250, WHOLE)  # --max-words for the downloaded corpus
