"""Run ``fairseq-deep`` where fairseq, omegaconf and hydra cannot be imported; arguments are those of the command.

Without arguments it runs each command of the JSON list on standard input, and prints the list of their exit statuses,
outputs and errors.
"""

import contextlib
import io
import json
import sys

import without_fairseq

without_fairseq.block()

from fairseq_deep.cli import main  # noqa: E402


def captured(words):
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
    return code, out.getvalue(), errors.getvalue()


if len(sys.argv) > 1:
    code = main()
else:
    print(json.dumps([captured(words) for words in json.load(sys.stdin)]))
    code = 0
without_fairseq.assert_nothing_is_loaded()
sys.exit(code)
