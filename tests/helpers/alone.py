"""Programs for processes in which fairseq, omegaconf and hydra cannot be imported: ``alone.py PART ARGUMENT ...``."""

import contextlib
import functools
import io
import json
import sys

for blocked in ("fairseq", "omegaconf", "hydra"):
    sys.modules[blocked] = None


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
    assert "transformers" not in sys.modules, "it takes seconds to import"


def serve(head, body, *words):
    """``fairseq-deep serve``, with so many seconds for the head and for the body of a request."""
    from fairseq_deep.cli import main
    from fairseq_deep.serving import messages, server

    server.HEAD_SECONDS = float(head)
    messages.Limits = functools.partial(messages.Limits, body_timeout=float(body))
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
