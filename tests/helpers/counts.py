"""Write the parameter counts that ``fairseq-deep archs`` prints: ``python -m tests.helpers.counts``."""

import json

from fairseq_deep.plugin.architectures import COUNTS, count_parameters, list_archs

if __name__ == "__main__":
    with open(COUNTS, "w", encoding="utf-8") as stream:
        json.dump({name: count_parameters(name) for name in list_archs()}, stream, indent=0)
        stream.write("\n")
