"""Runs ``fairseq-deep`` by this path, with the package of this clone."""

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from fairseq_deep.cli import main

    sys.exit(main())
