"""Calls in Python that are refused in one line: python.txt."""

import pytest
import torch

from fairseq_deep import cli
from fairseq_deep.core.aggregators import Dlcl
from fairseq_deep.core.description import AXES
from fairseq_deep.core.search import SearchOptions
from fairseq_deep.core.stack import MethodConfig, Stack
from fairseq_deep.core.transformer import Transformer
from fairseq_deep.errors import UsageError
from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from fairseq_deep.runtime import Translator
from tests.errors import assert_says, rows


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
