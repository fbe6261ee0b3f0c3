"""``python -m fairseq_deep`` is the command ``fairseq-deep``."""

import sys

from fairseq_deep.cli import main

if __name__ == "__main__":
    sys.exit(main())
