"""Parts of the recipes as programs: ``recipe_programs.py PART FLAGS`` calls a function of ``fairseq_deep.recipes``.

A problem is one line on stderr and exit status 65, as a stage of a recipe reports it.
"""

import argparse
import asyncio
import os
import sys

sys.modules["fairseq"] = None
sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from fairseq_deep.errors import UsageError  # noqa: E402
from fairseq_deep.recipes import engine, watch  # noqa: E402
from fairseq_deep.recipes.recipe import Recipe  # noqa: E402
from fairseq_deep.recipes.text import rebuild  # noqa: E402


class Plan:
    """A plan of which only options and folders are used."""

    def __init__(self, folders, **options):
        self.options, self.folders = Recipe(**options), folders
        self.langs = (self.options.source_lang, self.options.target_lang)
        self.description = folders.get("description", "")

    def path(self, *parts):
        return self.folders.get("/".join(parts)) or os.path.join(self.folders[parts[0]], *parts[1:])


def run_rebuild():
    parser = argparse.ArgumentParser()
    for name in ("source-lang", "target-lang", "corpus", "archives", "out", "url", "checksums"):
        parser.add_argument(f"--{name}", default="")
    args = parser.parse_args(sys.argv[2:])
    options = {"source_lang": args.source_lang, "target_lang": args.target_lang}
    options.update(data_url=args.url, checksums=args.checksums)
    plan = Plan({"description": args.corpus, "download": args.archives}, **options)
    rebuild.rebuild(plan, args.out)


def run_process():
    """``process --log FILE COMMAND``: statuses are those of a stage."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--log")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args(sys.argv[2:])
    try:
        with engine.Engine() as running:
            asyncio.run(running.run(args.command, args.log, watch.Watch()))
    except engine.Stopped:
        sys.exit(130)
    except engine.Failed:
        sys.exit(1)


if __name__ == "__main__":
    try:
        globals()[f"run_{sys.argv[1]}"]()
    except UsageError as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(65)
    except OSError as error:
        from fairseq_deep.recipes.runner import of_system

        print(f"error: {of_system(error)}", file=sys.stderr)
        sys.exit(65)
