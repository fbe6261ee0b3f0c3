"""``fairseq-deep serve`` where fairseq cannot be imported.

Arguments: seconds for the head of a request, then those of the command.
"""

import sys

import without_fairseq

without_fairseq.block()

from fairseq_deep.cli import main  # noqa: E402
from fairseq_deep.serving import server  # noqa: E402

server.HEAD_SECONDS = float(sys.argv[1])
code = main(["serve", *sys.argv[2:]])
without_fairseq.assert_nothing_is_loaded()
sys.exit(code)
