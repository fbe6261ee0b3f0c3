"""Runs the driver by its path, with the package of this clone."""

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from fairseq_deep.recipes.driver import main

    sys.exit(main(sys.argv[1:]))
