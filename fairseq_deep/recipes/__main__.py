"""Runs the driver by its path; fairseq is blocked where it is not needed, since its import takes seconds."""

import os
import sys

if __name__ == "__main__":
    if sys.argv[1].startswith("recipe/"):
        sys.modules["fairseq"] = None
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from fairseq_deep.recipes.driver import main

    sys.exit(main(sys.argv[1:]))
