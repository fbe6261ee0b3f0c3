"""Programs for processes in which fairseq, omegaconf and hydra cannot be imported: ``alone.py PART ARGUMENT ...``."""

import contextlib
import dataclasses
import io
import json
import sys

for blocked in ("fairseq", "omegaconf", "hydra"):
    sys.modules[blocked] = None


def core():
    """Every method of every axis: forward, backward, search."""
    from fairseq_deep.core.aggregators import AGGREGATORS
    from fairseq_deep.core.attention import DECODER_ATTENTIONS, ENCODER_ATTENTIONS
    from fairseq_deep.core.inits import INITS
    from fairseq_deep.core.memories import MEMORIES
    from fairseq_deep.core.residuals import RESIDUALS
    from fairseq_deep.core.stack import MethodConfig, Stack

    both = ("encoder", "decoder")
    for axis, registry, sides in (
        ("aggregator", AGGREGATORS, both), ("residual", RESIDUALS, both), ("init", INITS, both),
        ("memory", MEMORIES, both[1:]), ("attention", ENCODER_ATTENTIONS, both[:1]),
        ("attention", DECODER_ATTENTIONS, both[1:]),
    ):  # fmt: skip
        for name in registry.names():
            method = registry.get(name)
            chosen = {side: {axis: MethodConfig(name, method)} for side in sides}
            if name == "msc":
                chosen = {side: {"aggregator": MethodConfig(name, AGGREGATORS.get(name))} for side in both}
                chosen["decoder"]["memory"] = MethodConfig(name, MEMORIES.get(name))
            if registry is DECODER_ATTENTIONS and name == "luna":
                chosen["encoder"] = {"attention": MethodConfig(name, ENCODER_ATTENTIONS.get(name))}
            pre_norm = "pre" in getattr(method, "norms", ("pre",))
            stacks = {side: Stack(2, 16, pre_norm, side, ffn_dim=32, heads=2) for side in both}
            trains_and_translates({side: dataclasses.replace(stacks[side], **chosen.get(side, {})) for side in both})
    print("every method works")


def trains_and_translates(stacks):
    import torch

    from fairseq_deep.core.search import BeamSearch, SearchOptions
    from fairseq_deep.core.transformer import Transformer

    torch.manual_seed(1)
    model = Transformer.build(stacks, 20)
    source, target = torch.randint(4, 20, (3, 5)), torch.randint(4, 20, (3, 4))
    source[1, :2] = 1
    model.train()(source, None, target)[0].float().logsumexp(-1).sum().backward()
    missing = [key for key, parameter in model.named_parameters() if parameter.grad is None]
    assert not missing, (stacks, missing)
    found = BeamSearch([model.prepare_for_decoding()], SearchOptions(beam=3, max_len_b=6))(source)
    assert [len(sentence) for sentence in found] == [3, 3, 3], stacks
    assert all(each["score"].isfinite() for sentence in found for each in sentence), stacks


def deep(*words):
    """``fairseq-deep`` with *words*; without any, each command of the JSON list on standard input.

    Then it prints the list of their exit statuses, outputs and errors.
    """
    from fairseq_deep.cli import main

    def captured(words):
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            try:
                code = main(words)
            except SystemExit as end:
                code = end.code
        return code, out.getvalue(), errors.getvalue()

    if words:
        return main(list(words))
    print(json.dumps([captured(words) for words in json.load(sys.stdin)]))


def serve(seconds, *words):
    """``fairseq-deep serve``, with so many seconds for the head of a request."""
    from fairseq_deep.cli import main
    from fairseq_deep.serving import server

    server.HEAD_SECONDS = float(seconds)
    return main(["serve", *words])


def huggingface(folder, *lines):
    """The packaged model in *folder* by transformers' Auto classes."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    import fairseq_deep  # noqa: F401 (registers its classes, for the Auto classes are imported)

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)
    found = model.generate(**tokenizer(list(lines), padding=True, return_tensors="pt"))
    print("\n".join(tokenizer.batch_decode(found, skip_special_tokens=True)))


if __name__ == "__main__":
    sys.path[0] = __file__.rpartition("/tests/")[0]
    part, *arguments = sys.argv[1:]
    sys.exit(globals()[part](*arguments))
