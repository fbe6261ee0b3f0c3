"""Calls in Python and models that are refused in one line; errors of checkpoints, tracebacks, and ``--help``."""

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models import FairseqEncoder
from fairseq.safe_exit import OneLineError, line_of
from fairseq.utils import parse_alignment

import fairseq_deep
from fairseq_deep import cli
from fairseq_deep.core.aggregators import Dlcl
from fairseq_deep.core.attention import DECODER_ATTENTIONS
from fairseq_deep.core.description import AXES
from fairseq_deep.core.registry import Method, Registry
from fairseq_deep.core.search import SearchOptions
from fairseq_deep.core.stack import MethodConfig, Stack
from fairseq_deep.core.transformer import Transformer
from fairseq_deep.errors import UsageError
from fairseq_deep.plugin.architectures import build_architecture
from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from fairseq_deep.runtime import Translator
from tests.errors import assert_says, read_model, rows
from tests.helpers.flags import parse
from tests.helpers.methods import NO_FFN
from tests.helpers.models import make_dictionary, make_tagged_dictionary, task_of, tiny_flags

DLCL = "transformer_dlcl_2l2l_tiny"


def stack(**more):
    return Stack(**{"layers": 2, "dim": 16, "heads": 2, **more})


def stacks(**decoder):
    return {"encoder": stack(), "decoder": stack(**{"side": "decoder", **decoder})}


def method(axis, name, **options):
    return MethodConfig(name, AXES[axis][0].get(name), options)


@pytest.fixture(scope="module")
def names(trained, tmp_path_factory):
    """What the calls name."""
    transformers = pytest.importorskip("transformers")
    from fairseq_deep.huggingface import FairseqDeepConfig
    from fairseq_deep.huggingface.modeling import CACHE

    package = tmp_path_factory.mktemp("package") / "model"
    assert cli.main(["package", str(trained), "--output", str(package)]) == 0
    parts = {"bpe": "subword_nmt", "bpe_codes": str(trained / "text/bpe/code"), "tokenizer": "moses"}
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(package)
    tokenizer = transformers.AutoTokenizer.from_pretrained(package)
    batch = tokenizer(["We see."], return_tensors="pt")
    return {
        "stack": stack, "stacks": stacks, "method": method, "Dlcl": Dlcl, "SearchOptions": SearchOptions,
        "model_of": lambda entries: build_architecture(DLCL, make_dictionary(entries)),
        "build": lambda stacks: Transformer.build(stacks, 20), "nan": float("nan"),
        "Translator": Translator, "run": str(trained), "translator": Translator(str(trained), cpu=True),
        "hub": DeepTransformerModel.from_pretrained(str(trained), "averaged.pt", **parts),
        "Auto": transformers.AutoModelForSeq2SeqLM, "package": package, "torch": torch, "model": model, "batch": batch,
        "tokenizer": tokenizer, "Config": FairseqDeepConfig,
        "cache": model(**batch, decoder_input_ids=torch.tensor([[2]]), use_cache=True)[CACHE],
    }  # fmt: skip


@pytest.mark.parametrize("_, call, said", rows("python"))
def test_a_call_is_refused_in_one_line(_, call, said, names):
    with pytest.raises(UsageError) as error:
        eval(call, names)
    assert_says(error.value.message, said)


def test_the_hub_warns_of_unknown_tokens(names, caplog, monkeypatch):
    said = "tokens of the text are unknown to the model; check its language, and tokenizer=, bpe= and bpe_codes="
    names["hub"].translate("We see.")
    assert said not in caplog.text
    names["hub"].translate("ξένη γλώσσα")
    assert said in caplog.text
    caplog.clear()
    monkeypatch.setattr(names["hub"], "bpe", None)
    names["hub"].translate("We We We We γλώσσα")
    assert said in caplog.text


def test_a_mistake_is_an_ordinary_exception_in_python(build):
    """It does not end a notebook, and says what it says on the command line."""
    with pytest.raises(Exception, match="^unknown --dlcl-init zero") as error:
        build(DLCL, dlcl_init="zero")
    assert not isinstance(error.value, SystemExit)
    assert error.value.one_line == f"fairseq_deep: {error.value}"


def test_a_programming_error_keeps_its_traceback():
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


def test_a_name_is_registered_once():
    registry = Registry("--axis")
    for _ in range(2):  # a module may be imported twice
        registry.register("x")(type("X", (Method,), {}))
    with pytest.raises(ValueError, match="already registered"):
        registry.register("x")(type("Y", (Method,), {}))


def test_shared_embeddings_of_two_dictionaries(build, dictionary):
    args = build(DLCL).args
    args.share_all_embeddings = True
    with pytest.raises(UsageError, match="--joined-dictionary"):
        DeepTransformerModel.build_model(args, task_of(dictionary, Dictionary()))


@pytest.mark.parametrize("flags", [
    {"encoder_layers": 3}, {"layer_agg": "residual"}, {"encoder_ffn_embed_dim": 8},
    *({"decoder_attn": name} for name in DECODER_ATTENTIONS.names() if name not in ("self", "luna")),
    {"encoder_attn": "luna", "decoder_attn": "luna"},
], ids=str)  # fmt: skip
def test_a_checkpoint_of_another_architecture(build, flags):
    models = build(DLCL), build(DLCL, **flags)
    for one, other in (models, models[::-1]):
        with pytest.raises(UsageError) as error:
            one.load_state_dict(other.state_dict())
        assert "another architecture" in error.value.message


@pytest.mark.parametrize("flag", ["share_all_embeddings", "share_decoder_input_output_embed"])
def test_a_checkpoint_with_separate_tables_where_the_model_has_one(flag, build):
    shares = {"share_all_embeddings": False, "share_decoder_input_output_embed": False}
    model, state = build(DLCL, **{**shares, flag: True}), build(DLCL, **shares).state_dict()
    with pytest.raises(UsageError, match="decoder.[a-z_]+.weight differ, and the model shares them: omit --share-"):
        model.load_state_dict(state)
    diverged = {name: value * torch.nan for name, value in model.state_dict().items()}
    model.load_state_dict({name: value.clone() for name, value in diverged.items()})


def test_weights_of_an_unsupported_type(build):
    model = build(DLCL)
    state = model.state_dict()
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
        changed = {name: value.to(dtype) if value.dim() > 1 else value for name, value in state.items()}
        with pytest.raises(UsageError, match=f"unsupported type .encoder.embed_tokens.weight has the type {dtype}, "):
            model.load_state_dict(changed)
    for value in (None, 3.5, "x"):
        with pytest.raises(UsageError, match=f"encoder.embed_tokens.weight has the type {type(value).__name__}; 1 "):
            model.load_state_dict({**state, "encoder.embed_tokens.weight": value})


@pytest.mark.parametrize("before, command, said", rows("models"))
def test_a_model_is_refused_in_one_line(before, command, said, dictionary):
    words = make_tagged_dictionary(22, 12) if "-language" in command else dictionary
    with pytest.raises(UsageError) as error:
        arch, given = read_model(command)
        narrow = {**tiny_flags(f"transformer_{arch}"), **(NO_FFN if given.get("layer_agg") in ("lstm", "rnn") else {})}
        build_architecture(f"transformer_{arch}", words, **{**narrow, **given})
    assert_says(str(error.value), said)


@pytest.mark.parametrize("name", ["hyper-connections", "attention-residual"])
def test_a_norm_placement_that_only_a_configuration_can_give(name, build):
    with pytest.raises(UsageError, match=f"--decoder-normalize-before has no effect: --layer-agg {name} "):
        build("transformer_prenorm_2l2l_tiny", layer_agg=name, decoder_normalize_before=False)
