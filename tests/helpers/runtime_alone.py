"""Run ``fairseq-deep`` where fairseq, omegaconf and hydra cannot be imported; arguments are those of the command."""

import sys

import without_fairseq

without_fairseq.block()

from fairseq_deep.tools.main import main  # noqa: E402

code = main()
without_fairseq.assert_nothing_is_loaded()
sys.exit(code)
