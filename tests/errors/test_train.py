"""Mistakes in fairseq's commands: each ends with one line, the problem and the fix, before anything is written.

Flags that are checked as soon as they are read are only parsed; all others are given to the command.
"""

import shlex
import shutil

import pytest

from fairseq_deep.core.registry import UsageError
from tests.helpers.commands import PACKAGE, refusal, run
from tests.helpers.flags import one_line, parse

PRENORM, POSTNORM, DLCL = (f"transformer_{name}_2l2l_tiny" for name in ("prenorm", "postnorm", "dlcl"))
BLEU = "--eval-bleu --eval-bleu-args "
PARSED = [
    ("--layer-agg dclc", "did you mean dlcl?"),
    ("--encoder-layer-agg DLCL", "did you mean dlcl?"),
    ("--dlcl-weight-type scalar_x", "scalar_N"),
    ("--encoder-layers-to-keep 0,2", "requires a trained model: set it when you load the model"),
    ("--adaptive-softmax-cutoff 4,8 --criterion cross_entropy", "cross_entropy: use adaptive_loss"),
    ("--criterion adaptive_loss", "requires --adaptive-softmax-cutoff: add it, or use cross_entropy"),
    ("--offload-activations --cpu", "this run has none: use --checkpoint-activations"),
    ("--encoder-layerdrop 1", "--encoder-layerdrop 1.0 must be in [0, 1)"),
    ("--alignment-layer 1", "--alignment-layer has no effect without --load-alignments"),
    # precision and backends
    ("--ddp-backend fully_sharded", "use --ddp-backend pytorch_ddp"),
    ("--arch deep_transformer --fp16 --bf16", "--fp16 and --bf16 exclude each other"),
    ("--memory-efficient-bf16 --amp", "--bf16 and --amp exclude each other"),
    ("--fp16 --cpu", "--fp16 requires a GPU, but this run has none: use --bf16 or --memory-efficient-fp16, or omit it"),
    ("--completep-rates --residual completep", "requires --optimizer fused_adam"),
    ("--completep-rates --optimizer fused_adam --fp16 --cpu", "add --fp16-no-flatten-grads, or use --memory-ef"),
    # --optimizer muon
    ("--optimizer muon --muon-momentum 1", "--muon-momentum must be in [0, 1), not 1.0: use 0.95, or omit it"),
    ("--optimizer muon --muon-momentum -0.1", "--muon-momentum must be in [0, 1), not -0.1"),
    ("--optimizer muon --muon-momentum nan", "--muon-momentum must be in [0, 1), not nan"),
    ("--optimizer muon --muon-ns-steps 0", "--muon-ns-steps must be at least 1, not 0: use 5, or omit it"),
    ("--optimizer muon --use-bmuf", "not supported with --optimizer muon: use --optimizer adam, or omit"),
    # --lr-scheduler inverse_sqrt_cooldown
    *((f"--lr-scheduler inverse_sqrt_cooldown --warmup-updates 4 {flags}", words) for flags, words in [
        ("", "requires --max-update: the rate is zero there"),
        ("--max-update 100 --cooldown-updates 97", "--warmup-updates 4 and --cooldown-updates 97 are more than "
         "--max-update 100: lower one of them"),
        ("--max-update 100 --cooldown-updates 0", "--cooldown-updates must be at least 1, not 0"),
        ("--max-update 2", "--warmup-updates 4 and --cooldown-updates 1 are more than --max-update 2"),
        ("--max-update 100 --warmup-updates 0", "--warmup-updates 0 must be at least 1"),
        ("--max-update 100 --warmup-updates -1 --lr-before-cooldown constant", "--warmup-updates -1 must be at least"),
    ]),
    # --init-from
    ("--init-from old.pt", "--init-from old.pt: no such file; correct the path"),
    *((f"--init-from old.pt {flag} a", f"--init-from and {flag} both set weights: omit one of them")
      for flag in ("--restore-file", "--finetune-from-model", "--encoder-embed-path")),
    ("--stack-restart-updates 8", "--stack-restart-updates requires --init-from: add it, or omit this flag"),
    ("--init-from-order block", "--init-from-order requires --init-from: add it, or omit this flag"),
    ("--init-from old.pt --stack-restart-updates -1", "--stack-restart-updates -1 must be 0 or more: raise it to 0"),
    ("--init-from old.pt --stack-restart-updates 9 --max-update 9",
     "--stack-restart-updates 9 must be 0 or more, and less than --max-update 9: lower it"),
    # fairseq's own architectures
    *((f"--arch {arch} --layer-agg dlcl --encoder-layers-to-keep=1", "--layer-agg requires an architecture of this "
       "package: use one of 'fairseq-deep archs'") for arch in ("bart_base", "transformer_lm", "fconv")),
    # evaluation while training
    *((BLEU + shlex.quote(settings), f"--eval-bleu-args: {words}") for settings, words in [
        ('{"max_len_b": 0}', "use a higher max_len_b"),
        ('{"max_len_b": 3, "min_len": 4}', "use a higher max_len_b"),
        ('{"beam": 0}', "beam must be a whole number of at least 1 (0)"),
        ('{"beam": "4"}', "beam must be a whole number of at least 1 ('4')"),
        ('{"beam": true}', "beam must be a whole number of at least 1 (True)"),
        ('{"lenpen": NaN}', "lenpen must be a number (nan)"),
        ('{"max_len_a": Infinity}', "max_len_a must be a number of at least 0 (inf)"),
        ('{"max_len_b": ' + "9" * 400 + "}", "max_len_b must be a whole number from 0 to 1000000 (9"),
        ('{"baem": 4}', "unknown setting baem (did you mean beam?)"),
        ("{beam: 4}", "not JSON ({beam: 4})"),
        ("[" * 100_000, "not JSON"),
        ("[4]", "not a JSON object"),
        ('{"beam": 2, "nbest": 3}', "nbest exceeds beam (3)"),
        ('{"temperature": 0}', "temperature must be a number of at least 0.001 (0)"),
        ('{"sampling_topk": 3}', "sampling_topk requires sampling"),
        ('{"sampling": true, "match_source_len": true}', "sampling and match_source_len exclude each other"),
        ('{"diverse_beam_groups": 3}', "diverse_beam_groups does not divide beam (3)"),
        ('{"print_alignment": true}', "print_alignment is not supported during validation"),
        ('{"score_reference": true}', "score_reference is not supported during validation"),
    ]),
    ("--eval-bleu --eval-bleu-detok nope", "--eval-bleu-detok: cannot build nope (KeyError: 'nope'); use one of moses"),
    ("--eval-bleu --eval-bleu-detok moses --eval-bleu-detok-args '{\"tokenizer\": \"space\"}'", "detok: cannot build"),
    ("--eval-bleu --eval-bleu-remove-bpe zz", "--eval-bleu-remove-bpe: unknown kind of sub-words (zz)"),
]  # fmt: skip


@pytest.mark.parametrize("flags, words", PARSED, ids=[flags[:60] for flags, _ in PARSED])
def test_flags_are_refused_as_soon_as_they_are_read(flags, words, tmp_path):
    old = tmp_path / "old.pt"
    if "old.pt " in flags:
        old.write_text("")
    flags = flags.replace("old.pt", str(old)).replace("--encoder-embed-path a", f"--encoder-embed-path {old}")
    with pytest.raises(UsageError) as error:
        parse("--arch", DLCL, "--optimizer", "adam", "--save-dir", str(tmp_path / "save"), *shlex.split(flags))
    message, *parts = one_line(error), *words.replace("old.pt", str(old)).split(": ", 1)
    assert all(part in message for part in parts), message


# the whole command line after the data
BARE = [
    ("--arch transformer_dlcl_30l", "unknown architecture transformer_dlcl_30l: add the --user-dir of its package"),
    ("--user-dir {package} --arch transformer_dlcl_30", "unknown architecture transformer_dlcl_30: did you mean "
     "transformer_dlcl_30l? Otherwise add the --user-dir of its package"),
    ("--user-dir nowhere --arch transformer", "--user-dir nowhere: no such directory; correct the path"),
    ("--user-dir {package} --task translation", "--arch is missing: name an architecture"),
    ("--user-dir {package}/.. --arch transformer", ": has no __init__.py; give the directory of a package"),
    ("--user-dir {package}/plugin --arch transformer", "--user-dir must be the directory fairseq_deep, not "),
    ("--user-dir {package} --arch transformer_iwslt_de_en --optimizer muon --lr 1e-3 --max-tokens 400 --cpu",
     "use a deep_ architecture"),
    (f"--user-dir {{package}} --arch {PRENORM} --optimizer adam --cpu",
     "Must specify batch size either with --max-tokens or --batch-size"),
]  # fmt: skip
PLATEAU = "--lr-scheduler reduce_lr_on_plateau"
METRIC, MAXIMIZE = "--best-checkpoint-metric", "--maximize-best-checkpoint-metric"
EVALUATED = BLEU + shlex.quote('{"beam": 2, "max_len_b": 10}')
# which data, flags after those of a small training, words of the last line
TRAINING = [
    ("small", "--max-tokens 1", "The dataset is empty. This could indicate that all"),
    ("small", "--dataset-impl cached", "Index file doesn't match expected format. Make sure that --data"),
    ("small", "--dataset-impl fasta", "Dataset not found: valid ("),
    ("small", "--train-subset train7", "; correct the split, the languages or --dataset-impl"),
    ("empty", "", ".src.bin: no sentences; binarise text with sentences, or name another split"),
    ("twice", "", "Duplicate word found when loading Dictionary: '1'. Duplicate words can overwrite"),
    ("unequal", "", "the numbers of sentences must be equal (60 and 8"),
    ("small", "--lr-scheduler inverse_sqrt --warmup-updates 0", "--warmup-updates must be at "),
    ("small", "--max-update 0 --lr-scheduler polynomial_decay", "add --max-update or --total-num-"),
    ("small", "--lr-scheduler tri_stage", "please specify steps or phase_ratio"),
    ("small", "--lr-scheduler inverse_sqrt_cooldown --max-update 0",
     "fairseq_deep: --lr-scheduler inverse_sqrt_cooldown requires --max-update: the rate is zero there"),
    ("small", "--task translation_from_pretrained_bart", "requires --langs: name the languages"),
    ("small", "--task multilingual_translation", "--task multilingual_translation is not supported"),
    ("small", "--task language_modeling", "--task language_modeling is not supported with this"),
    ("small", "--task translation_lev", "--task translation_lev is not supported with this architecture"),
    ("small", "--task denoising", "(argument --max-source-positions: conflicting option string"),
    ("small", "--task online_backtranslation", "--mono-langs is required; add it"),
    ("small", "--task deep_translation --robt", "fairseq_deep: --robt requires at least two language tags"),
    ("small", "--criterion nat_loss", "--criterion nat_loss is not supported with this architecture"),
    ("small", "--layer-agg dclc", "fairseq_deep: "),
    ("small", "--layer-agg linear --encoder-layerdrop 0.1", "--encoder-layerdrop is not supported with"),
    ("small", "--layer-agg dlcl --dlcl-weight-type scalar_3", "does not divide the width"),
    ("small", "--tensorboard-logdir /dev/null/logs", "--tensorboard-logdir /dev/null/logs: cannot write there"),
    ("small", "--fp16", "use --bf16"),
    ("small", f"--arch {POSTNORM} --deep-init admin --admin-start profile --max-update 2 --bf16", "--max-update 1"),
    ("small", "--load-alignments --criterion label_smoothed_cross_entropy_with_alignment --alignment-layer 1",
     "has no alignments of train; run fairseq-preprocess with --align-suffix"),
    # what validation produces, and where a run starts
    ("small", f"{EVALUATED} {METRIC} bleu", f"{METRIC} bleu requires {MAXIMIZE}: add it"),
    ("small", f"{METRIC} bleu {MAXIMIZE}", f"{METRIC} bleu requires --eval-bleu: add it"),
    ("small", f"{METRIC} los", f"unknown {METRIC} los; choose from loss, ppl"),
    ("small", f"{EVALUATED} {PLATEAU} {METRIC} beu", "beu; choose from bleu, loss, ppl"),
    ("small", f"{METRIC} accuracy {MAXIMIZE}", f"unknown {METRIC} accuracy; choose from loss"),
    ("small", MAXIMIZE, f"{MAXIMIZE} is not supported with {METRIC} loss: omit it"),
    ("small", f"{PLATEAU} --disable-validation", f"{PLATEAU} is not supported with --disable-validation; omit one"),
    ("small", "--patience 2 --disable-validation", "--patience is not supported with --disable-validation; omit one"),
    ("small", "--keep-best-checkpoints 2 --disable-validation", "--keep-best-checkpoints is not supported with --dis"),
    *(("small", f"{flag} none.pt", f"{flag} none.pt: no such file; correct the path")
      for flag in ("--restore-file", "--continue-once", "--finetune-from-model")),
    ("small", "--finetune-from-model a.pt --restore-file b.pt", "--restore-file (non-default value) exclude each"),
    ("small", "--finetune-from-model a.pt --reset-meters", "--finetune-from-model implies all --reset flags; omit"),
    # what another flag switches on
    ("small", "--ema-decay 0.9", "--ema-decay requires --store-ema: add it"),
    ("small", "--keep-interval-updates 3", "--keep-interval-updates requires --save-interval-updates: add it"),
    ("small", "--fp16-init-scale 4 --bf16", "--fp16-init-scale requires --fp16: add it"),
    ("small", "--eval-bleu-args '{\"beam\": 2}'", "--eval-bleu-args requires --eval-bleu: add it"),
    ("small", "--eval-bleu-print-samples --task deep_translation", "--eval-bleu-print-samples requires --eval-bleu"),
    ("small", "--num-shards 2", "--num-shards is not supported by fairseq-train; omit it"),
]  # fmt: skip
SMALL = f"--user-dir {PACKAGE} --arch {PRENORM} --optimizer adam --lr 0.01 --max-tokens 400 --max-update 1 --cpu"


@pytest.fixture(scope="module")
def splits(small, tmp_path_factory):
    """{name: data}: as they are, with an empty split, a word twice, sides of other lengths, another valid split."""
    folder = tmp_path_factory.mktemp("splits")
    found = {"small": small, **{name: folder / name for name in ("empty", "twice", "unequal", "more")}}
    for name in list(found)[1:]:
        shutil.copytree(small, found[name])
    for each in found["empty"].glob("valid*.bin"):
        each.write_bytes(b"")
    (found["twice"] / "dict.src.txt").write_text("1 3\n1 3\n")
    for each in small.glob("valid.src-tgt.tgt.*"):
        shutil.copy(each, found["unequal"] / each.name.replace("valid", "train"))
    for each in small.glob("valid*"):
        shutil.copy(each, found["more"] / each.name.replace("valid", "valid1"))
    return found


@pytest.mark.parametrize("flags, words", BARE, ids=[flags[-60:] for flags, _ in BARE])
def test_what_a_training_cannot_be_without(flags, words, small, tmp_path):
    done = run("fairseq-train", small, *flags.format(package=PACKAGE).split(), check=False, cwd=tmp_path)
    assert words in refusal(done), done.stderr
    if words.startswith("unknown architecture"):
        assert (done.stdout, done.stderr) == ("", words + "\n")


@pytest.mark.parametrize("data, flags, words", TRAINING, ids=[f"{data} {flags[-60:]}" for data, flags, _ in TRAINING])
def test_a_training_is_refused_before_its_first_update(data, flags, words, splits, tmp_path):
    command = ["fairseq-train", splits[data], *SMALL.split(), "--save-dir", tmp_path / "save", *shlex.split(flags)]
    done = run(*command, check=False, cwd=tmp_path)
    assert words in refusal(done), done.stderr[-2000:]
    assert not list(tmp_path.rglob("*.pt"))


GENERATION = [
    ("--constraints", "--constraints is only supported by fairseq-interactive: use it"),
    ("--sampling", "--sampling requires --nbest to be equal to --beam"),
    ("--replace-unk", "--replace-unk requires a raw text dataset (--dataset-impl=raw)"),
    ("--gen-subset tst", "Dataset not found: tst ("),
    ("--diverse-beam-groups 2", "DiverseBeamSearch requires --beam to be divisible by the number of groups"),
]


@pytest.fixture(scope="module")
def checkpoint(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run("fairseq-train", small, *SMALL.split(), "--save-dir", folder)
    return folder / "checkpoint_last.pt"


@pytest.mark.parametrize("flags, words", GENERATION)
def test_a_generation_is_refused(flags, words, small, checkpoint):
    command = ["fairseq-generate", small, "--user-dir", PACKAGE, "--path", checkpoint, "--cpu", "--gen-subset", "valid"]
    assert words in refusal(run(*command, *flags.split(), check=False))


def test_an_unknown_precision_is_refused(small, checkpoint):
    flags = ["--cpu", "--task", "deep_translation", "--decode-precision", "int4"]
    done = run("fairseq-generate", small, "--user-dir", PACKAGE, "--path", checkpoint, *flags, check=False)
    assert done.returncode != 0 and "int4" in done.stderr


PREPROCESSING = [
    ("--validpref valid", "valid.src and valid.tgt: the numbers of sentences must be equal (3 and 2)"),
    ("--testpref train,valid --dataset-impl raw", "valid.src and valid.tgt: the numbers of"),
    ("--trainpref train --align-suffix align", "(3 and 3 and 4)"),
    ("--trainpref train --alignfile train.align", "(3 and 3 and 4)"),
    ("--trainpref test", "test.src: cannot be read (No such file or directory); correct the path"),
    ("--trainpref latin", "latin.src, line 2: not UTF-8; convert the file with iconv"),
]


@pytest.mark.parametrize("flags, words", PREPROCESSING)
def test_preprocess_reads_all_text_before_it_writes(flags, words, tmp_path):
    for name, count in (("train.src", 3), ("train.tgt", 3), ("valid.src", 3), ("valid.tgt", 2), ("train.align", 4)):
        (tmp_path / name).write_text("0-0\n" * count)
    (tmp_path / "latin.src").write_bytes(b"a\n\xe4\n")
    done = run("fairseq-preprocess", "-s", "src", "-t", "tgt", *flags.split(), check=False, cwd=tmp_path)
    assert words in refusal(done) and not (tmp_path / "data-bin").exists()


@pytest.mark.parametrize("data, flags", [
    ("small", "--num-batch-buckets 2"), ("more", "--combine-valid-subsets"),
    ("small", "--lr-scheduler polynomial_decay"),
    ("small", "--task translation_from_pretrained_bart --langs src,tgt"),
])  # fmt: skip
def test_flags_of_fairseq_that_once_failed_train(data, flags, splits):
    flags = [*SMALL.split(), *flags.split(), "--no-save", "--log-format", "simple"]
    assert "num_updates 1" in run("fairseq-train", splits[data], *flags).stdout
