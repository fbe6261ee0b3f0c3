"""Mistakes end with one line that names the problem and the cure."""


import shutil

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models import FairseqEncoder
from fairseq.safe_exit import OneLineError
from fairseq.utils import parse_alignment

import fairseq_deep
from fairseq_deep.core.registry import Registry, UsageError
from fairseq_deep.plugin.architectures import build_architecture, get_architecture
from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from tests.helpers.commands import PACKAGE, run
from tests.helpers.flags import one_line, parse
from tests.helpers.models import task_of


@pytest.mark.parametrize("flag", ["--layer-agg", "--encoder-layer-agg", "--decoder-layer-agg"])
@pytest.mark.parametrize("name", ["dclc", "DLCL", "Dlcl"])
def test_unknown_aggregator_names_the_nearest(flag, name):
    with pytest.raises(UsageError) as error:
        parse("--arch", "transformer_dlcl_30l", flag, name)
    assert "did you mean dlcl?" in one_line(error)
    assert "residual" in one_line(error)


@pytest.mark.parametrize(
    "flags, line",
    [
        (
            ("--arch", "transformer_dlcl_30l"),
            "unknown architecture transformer_dlcl_30l: add the --user-dir of its package",
        ),
        (
            ("--user-dir", PACKAGE, "--arch", "transformer_dlcl_30"),
            "unknown architecture transformer_dlcl_30: did you mean transformer_dlcl_30l? "
            "Otherwise add the --user-dir of its package",
        ),
        (("--user-dir", "nowhere", "--arch", "transformer"), "--user-dir nowhere: no such directory; correct the path"),
    ],
    ids=["no plugin", "mistyped", "no folder"],
)
def test_what_nothing_has_registered_is_one_line(flags, line):
    done = run("fairseq-train", "data", *flags, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (1, line + "\n", "")


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--encoder-layers-to-keep", "0,2"), "requires a trained model: set it when you load the model"),
        (("--adaptive-softmax-cutoff", "4,8", "--criterion", "cross_entropy"), "cross_entropy: use adaptive_loss"),
        (("--criterion", "adaptive_loss"), "requires --adaptive-softmax-cutoff: add it, or use cross_entropy"),
        (("--offload-activations", "--cpu"), "this run has none: use --checkpoint-activations"),
    ],
)
def test_flags_of_fairseq_that_end_in_a_traceback(flags, words):
    with pytest.raises(UsageError) as error:
        parse("--arch", "transformer_dlcl_30l", *flags)
    assert words in one_line(error)


@pytest.fixture(scope="module")
def split(small, tmp_path_factory):
    """split(name): the data with an empty split, another valid split, or a dictionary with a word twice."""
    folder = tmp_path_factory.mktemp("splits")
    for name in ("empty", "twice", "more"):
        shutil.copytree(small, folder / name)
    for each in (folder / "empty").glob("valid*.bin"):
        each.write_bytes(b"")
    (folder / "twice/dict.src.txt").write_text("1 3\n1 3\n")
    for each in (folder / "more").glob("valid*"):
        shutil.copy(each, str(each).replace("/valid", "/valid1"))
    return lambda name: small if name == "small" else folder / name


TINY = ("--user-dir", PACKAGE, "--arch", "transformer_prenorm_2l2l_tiny", "--optimizer", "adam", "--lr", "0.01",
        "--cpu", "--no-save", "--max-update", "1")  # fmt: skip
SIZED = (*TINY, "--max-tokens", "400")


@pytest.mark.parametrize("data, flags, line", [
    ("small", TINY, "Must specify batch size either with --max-tokens or --batch-size"),
    ("small", (*SIZED[:-1], "1"), "The dataset is empty. This could indicate that all"),
    ("small", (*SIZED, "--dataset-impl", "cached"), "Index file doesn't match expected format. Make sure that --data"),
    ("small", (*SIZED, "--dataset-impl", "fasta"), "Dataset not found: valid ("),
    ("small", (*SIZED, "--train-subset", "train7"), "; correct the split, the languages or --dataset-impl"),
    ("empty", SIZED, ".src.bin: no sentences; binarise text with sentences, or name another split"),
    ("twice", SIZED, "Duplicate word found when loading Dictionary: '1'. Duplicate words can overwrite"),
    ("small", (*SIZED, "--lr-scheduler", "inverse_sqrt", "--warmup-updates", "0"), "--warmup-updates must be at "),
    ("small", (*SIZED, "--max-update", "0", "--lr-scheduler", "polynomial_decay"), "add --max-update or --total-num-"),
    ("small", (*SIZED, "--lr-scheduler", "tri_stage"), "please specify steps or phase_ratio"),
    ("small", (*SIZED, "--task", "translation_from_pretrained_bart"), "requires --langs: name the languages"),
    ("small", (*SIZED, "--task", "multilingual_translation"), "--task multilingual_translation is not supported"),
    ("small", (*SIZED, "--task", "language_modeling"), "--task language_modeling is not supported with this"),
    ("small", (*SIZED, "--task", "translation_lev"), "--task translation_lev is not supported with this architecture"),
    ("small", (*SIZED, "--task", "denoising"), "(argument --max-source-positions: conflicting option string"),
    ("small", (*SIZED, "--criterion", "nat_loss"), "--criterion nat_loss is not supported with this architecture"),
    ("small", (*TINY[:2], "--task", "translation"), "--arch is missing: name an architecture"),
    ("small", ("--user-dir", PACKAGE.parent, *TINY[2:]), ": has no __init__.py; give the directory of a package"),
    ("small", ("--user-dir", PACKAGE / "plugin", *TINY[2:]), "--user-dir must be the directory fairseq_deep, not "),
])  # fmt: skip
def test_mistakes_in_training_flags_and_data_are_one_line(split, data, flags, line):
    done = run("fairseq-train", split(data), *flags, check=False)
    assert (done.returncode, line in done.stderr.splitlines()[-1]) == (1, True), done.stderr[-2000:]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("data, flags", [
    ("small", ("--num-batch-buckets", "2")),
    ("more", ("--combine-valid-subsets",)),
    ("small", ("--lr-scheduler", "polynomial_decay")),
    ("small", ("--task", "translation_from_pretrained_bart", "--langs", "src,tgt")),
])  # fmt: skip
def test_flags_of_fairseq_that_ended_in_a_traceback_train(split, data, flags):
    assert "num_updates 1" in run("fairseq-train", split(data), *SIZED, *flags, "--log-format", "simple").stdout


@pytest.mark.parametrize("flags, line", [
    (("--constraints",), "--constraints is only supported by fairseq-interactive: use it"),
    (("--sampling",), "--sampling requires --nbest to be equal to --beam"),
    (("--replace-unk",), "--replace-unk requires a raw text dataset (--dataset-impl=raw)"),
    (("--gen-subset", "tst"), "Dataset not found: tst ("),
    (("--diverse-beam-groups", "2"), "DiverseBeamSearch requires --beam to be divisible by the number of groups"),
])  # fmt: skip
def test_mistakes_in_generation_flags_are_one_line(small, tmp_path, flags, line):
    run("fairseq-train", small, *(word for word in SIZED if word != "--no-save"), "--save-dir", tmp_path)
    words = ("--user-dir", PACKAGE, "--path", tmp_path / "checkpoint_last.pt", "--cpu", "--gen-subset", "valid", *flags)
    done = run("fairseq-generate", small, *words, check=False)
    assert (done.returncode, line in done.stderr.splitlines()[-1]) == (1, True), done.stderr[-2000:]
    assert "Traceback" not in done.stderr


def test_a_programming_error_keeps_its_traceback():
    from fairseq.safe_exit import line_of

    def caught(function, *arguments):
        try:
            function(*arguments)
        except Exception as error:
            return error

    assert line_of(caught(int, "a")) is None and line_of(caught(Dictionary().index, [])) is None
    assert line_of(caught(Dictionary().add_from_file, "a/b")) == "a/b: No such file or directory; correct the path"
    assert line_of(caught(torch.nn.functional.linear, torch.ones(2), torch.ones(3, 3))) is None
    assert line_of(caught(FairseqEncoder(Dictionary()).reorder_encoder_out, 1, 2)) is None  # a method that is missing


@pytest.mark.parametrize("arch", ["transformer", "deep_transformer", "transformer_dlcl_30l", "bart_base"])
def test_help_shows_the_flags_of_the_architecture(arch, capsys):
    with pytest.raises(SystemExit) as end:
        parse("--arch", arch, "--criterion", "label_smoothed_cross_entropy", "--help")
    told = capsys.readouterr().out
    assert end.value.code == 0 and "--encoder-layers" in told and "--label-smoothing" in told
    assert ("--dlcl-window" in told) == ("deep" in arch or "dlcl" in arch)
    with pytest.raises(SystemExit):
        parse("--help")
    assert "--encoder-layers" not in capsys.readouterr().out


def test_scripting_a_model_names_what_works(build):
    with pytest.raises(UsageError, match="fairseq-deep export"):
        torch.jit.script(build("transformer_dlcl_2l2l_tiny"))


def test_malformed_alignments():
    for text in ("-1-0", "3", "a-b", "1-1-"):
        with pytest.raises(OneLineError, match="must be SOURCE-TARGET"):
            parse_alignment(f"0-0 {text}")
    assert parse_alignment("0-1 2-3").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name, home", [
    ("Dlcl", "core.aggregators"), ("Highway", "core.residuals"), ("Stack", "core.stack"), ("Translator", "runtime"),
])  # fmt: skip
def test_a_class_of_another_module_is_named(name, home):
    with pytest.raises(ImportError, match=f"from fairseq_deep.{home} import {name}$"):
        getattr(fairseq_deep, name)
    exec(f"from fairseq_deep.{home} import {name}")
    assert not hasattr(fairseq_deep, "Unknown") and not hasattr(fairseq_deep, "dlcl")


def test_unknown_weight_type():
    with pytest.raises(UsageError) as error:
        parse("--arch", "transformer_dlcl_30l", "--dlcl-weight-type", "scalar_x")
    assert "scalar_N" in one_line(error)


def test_unknown_architecture_names_the_nearest():
    with pytest.raises(UsageError) as error:
        get_architecture("transformer_dclc_30l")
    assert "did you mean transformer_dlcl_30l?" in one_line(error)


@pytest.mark.parametrize(
    "name, flags, words",
    [
        ("transformer_linear_6l", {"encoder_layerdrop": 0.1}, "omit --encoder-layerdrop"),
        ("transformer_linear_6l", {"decoder_layerdrop": 0.1, "layer_agg": "linear"}, "omit --decoder-layerdrop"),
        ("transformer_dlcl_6l", {"encoder_layers_to_keep": "0,2"}, "omit --encoder-layers-to-keep"),
        ("transformer_prenorm_6l", {"decoder_output_dim": 8, "share_decoder_input_output_embed": True},
         "--decoder-output-dim 8 must be the width of the shared embeddings, 16: omit it"),
        *(("transformer_prenorm_6l", {flag: value}, f"--{flag.replace('_', '-')} is not supported")
          for flag, value in (("cross_self_attention", True), ("encoder_xformers_att_config", "{}"),
                              ("decoder_xformers_att_config", "{}"), ("base_layers", 1), ("char_inputs", True))),
        ("transformer_prenorm_6l", {"adaptive_softmax_cutoff": "4,8", "tie_adaptive_weights": True},
         "--tie-adaptive-weights requires adaptive inputs"),
        ("transformer_prenorm_6l", {"dlcl_window": 2}, "--dlcl-window has no effect without --layer-agg dlcl"),
        ("transformer_dlcl_postnorm_6l", {"dlcl_no_norm": True}, "--dlcl-no-norm requires a pre-norm stack"),
        ("transformer_dlcl_6l", {"dlcl_weight_type": "scalar_3"}, "does not divide the width 16"),
        ("transformer_dlcl_6l", {"dlcl_init": "zero"}, "--dlcl-init zero"),
        ("transformer_dlcl_6l", {"encoder_attention_heads": 3}, "--encoder-embed-dim 16 is not divisible"),
        ("transformer_dlcl_6l", {"encoder_attention_heads": -1}, "--encoder-attention-heads must be a whole number of"),
        ("transformer_dlcl_6l", {"encoder_layers": -1}, "--encoder-layers must be a whole number of at least 0 (-1)"),
        ("transformer_dlcl_6l", {"max_target_positions": 0}, "--max-target-positions must be a whole number of at"),
        ("transformer_dlcl_6l", {"dropout": 2.0}, "--dropout must be a number from 0 to 1 (2.0): change it"),
        ("transformer_dlcl_6l", {"decoder_layerdrop": float("nan")}, "--decoder-layerdrop must be a number from 0"),
        (
            "transformer_dlcl_6l",
            {"decoder_embed_dim": 8, "share_all_embeddings": True},
            "--share-all-embeddings requires equal widths",
        ),
    ],
)
def test_flags_that_clash(build, name, flags, words):
    with pytest.raises(UsageError) as error:
        build(name, **flags)
    assert words in one_line(error)


def test_options_of_the_aggregator_of_one_side(build):
    model = build("transformer_prenorm_6l", decoder_layer_agg="dlcl", dlcl_weight_type="vector")
    assert model.decoder.aggregator.weight.shape == (7, 7, 16)
    assert not list(model.encoder.aggregator.parameters())


def test_shared_embeddings_of_two_dictionaries(build, dictionary):
    task = task_of(dictionary, Dictionary())
    args = build("transformer_dlcl_2l2l_tiny").args
    args.share_all_embeddings = True
    with pytest.raises(UsageError) as error:
        DeepTransformerModel.build_model(args, task)
    assert "--joined-dictionary" in one_line(error)


def test_a_checkpoint_of_another_vocabulary(build):
    other = Dictionary()
    other.add_symbol("w")
    theirs = build_architecture("transformer_dlcl_2l2l_tiny", other)
    with pytest.raises(UsageError) as error:
        build_architecture("transformer_dlcl_2l2l_tiny", Dictionary()).load_state_dict(theirs.state_dict())
    assert "vocabulary of 5 entries" in one_line(error)
    assert "has 4" in one_line(error)


@pytest.mark.parametrize("flags", [{"encoder_layers": 3}, {"layer_agg": "residual"}, {"encoder_ffn_embed_dim": 8}])
def test_a_checkpoint_of_another_architecture(build, flags):
    model = build("transformer_dlcl_2l2l_tiny")
    with pytest.raises(UsageError) as error:
        model.load_state_dict(build("transformer_dlcl_2l2l_tiny", **flags).state_dict())
    assert "another architecture" in one_line(error)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_weights_of_an_unsupported_type(dtype, build):
    model = build("transformer_dlcl_2l2l_tiny")
    with pytest.raises(UsageError, match=f"unsupported type .encoder.embed_tokens.weight has the type {dtype}, "):
        state = model.state_dict()
        model.load_state_dict({name: state[name].to(dtype) if state[name].dim() > 1 else state[name] for name in state})
    for value in (None, 3.5, "x"):
        with pytest.raises(UsageError, match=f"encoder.embed_tokens.weight has the type {type(value).__name__}; 1 "):
            model.load_state_dict({**state, "encoder.embed_tokens.weight": value})


def test_a_name_is_registered_once():
    registry = Registry("--axis")
    registry.register("x")(int)
    registry.register("x")(int)  # a module that is imported twice
    with pytest.raises(ValueError, match="already registered"):
        registry.register("x")(str)


@pytest.mark.parametrize("interval", [0, -3])
def test_an_interval_that_logs_nothing(build, interval):
    with pytest.raises(UsageError) as error:
        build("transformer_prenorm_6l", log_depth_interval=interval)
    assert f"--log-depth-interval {interval} must be at least 1" in one_line(error)


def test_a_mistake_is_an_ordinary_exception_in_python(build):
    """It does not end a notebook, and says what it says on the command line."""
    with pytest.raises(Exception, match="^--dlcl-init zero is unknown") as error:
        build("transformer_dlcl_6l", dlcl_init="zero")
    assert not isinstance(error.value, SystemExit)
    assert error.value.one_line == f"fairseq_deep: {error.value}"
