"""The stages of a recipe: set-up, data, text, binarise, train, average, generate, score."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil

from fairseq_deep.errors import UsageError
from fairseq_deep.plugin.bleu import bleu_for
from fairseq_deep.runtime.language_codes import tokenizer_language
from fairseq_deep.tools import allocator
from fairseq_deep.tools.output_files import write_text

from . import nodes, record
from .changes import can_resume
from .engine import Failed
from .options import EXAMPLES, ROOT, flag_of, quote
from .runner import Runner, Stage
from .text.corpus import check_lengths, copy_corpus, find_splits
from .watch import Echo, Generate, Train, Watch


async def set_up(runner: Runner, out: str = "env.txt") -> None:
    """Check this machine and record its properties."""
    plan, options = runner.plan, runner.plan.options
    await runner.run("fairseq-deep", "doctor")
    if runner.dry:
        return
    if plan.subsets and options.stop_stage == 7 and not plan.place.rank:
        bleu_for(tokenizer_language(options.target_lang))  # its package is checked before training
    record.write_environment(plan.path(out), options.ngpu)


async def get_data(runner: Runner) -> None:
    """Get and check the text."""
    plan, options, raw = runner.plan, runner.plan.options, runner.plan.path("text", "raw")
    if options.multilingual:
        from .text import pairs

        runner.call("all pairs are combined to one text", pairs.prepare, plan)
        return
    source = {"demo": plan.path("corpus"), "folder": options.data, "download": plan.path("corpus")}.get(plan.route)
    if plan.route == "demo":
        await runner.run("python3", os.path.join(EXAMPLES, "demo", "make_corpus.py"), "--out", source)
    if plan.route == "download":
        if not plan.has_download:
            runner.call("no public archive: --data DIR", lambda: None)
            return
        from .text import rebuild

        runner.call(f"the corpus of {plan.description} is downloaded and rebuilt", rebuild.rebuild, plan, source)
    name = options.data if plan.route == "folder" else plan.route
    if options.teacher:
        name = f"{name}, translated by {options.teacher}"
        distilled = plan.path(f"distilled-{plan.keys[1][:12]}")  # of this teacher and text
        device = ["--cpu"] * (not options.ngpu)
        words = ["--text", source, "--output", distilled, "--source-lang", options.source_lang]
        words += ["--target-lang", options.target_lang, *device]
        await runner.run("fairseq-deep", "distill", options.teacher, *words)
        source = distilled
    runner.call(f"the text of {source} is checked and copied", copy_corpus, source, raw, plan.langs, name)


async def cut_text(runner: Runner) -> None:
    """Tokenise the text and split it into sub-words."""
    plan, options = runner.plan, runner.plan.options
    text = plan.path("text", "raw")
    runner.need(text)
    if runner.dry:
        names = ("bpe", "bpe_merges", "max_words", "max_subwords", "lowercase")
        words = [word for name in names for word in (flag_of(name), getattr(options, name))]
        runner.call(f"subwords {quote(words)}", lambda: None)
        return
    from .text.subwords import cut_corpus

    runner.call("", cut_corpus, text, plan.path("text", "bpe"), plan)


async def binarise(runner: Runner) -> None:
    """Binarise the sub-words."""
    plan, options, prefix = runner.plan, runner.plan.options, runner.plan.path("text", "bpe")
    runner.need(prefix)
    new, joined = plan.path("data-bin.new"), [] if options.bpe == "per-side" else ["--joined-dictionary"]
    if not runner.dry:
        shutil.rmtree(new, ignore_errors=True)
    await runner.run(
        "fairseq-preprocess", "--source-lang", options.source_lang, "--target-lang", options.target_lang, *joined,
        "--trainpref", f"{prefix}/train", "--validpref", f"{prefix}/valid", "--testpref", _test_prefixes(runner),
        "--thresholdsrc", options.vocab_threshold, "--thresholdtgt", options.vocab_threshold,
        "--workers", options.workers, "--destdir", new,
    )  # fmt: skip
    runner.replace(new, plan.path("data-bin"))


def _test_prefixes(runner: Runner) -> str:
    """Return the prefixes of all test sets for fairseq-preprocess."""
    plan, prefix = runner.plan, runner.plan.path("text", "bpe")
    names = plan.subsets if runner.dry else find_splits(prefix, plan.options.source_lang)
    tests = dict.fromkeys(name for name in ("test", *names) if name.startswith("test"))
    return ",".join(f"{prefix}/{name}" for name in tests)


async def train(runner: Runner) -> None:
    """Train, or resume an interrupted run."""
    plan, options = runner.plan, runner.plan.options
    runner.need(plan.path("data-bin"))
    last = plan.path("checkpoints", "checkpoint_last.pt")
    if not runner.dry:
        sets = find_splits(plan.path("text", "bpe"), options.source_lang)
        for subset in plan.subsets:
            if subset not in sets:
                raise UsageError(f"--subsets {options.subsets}: the text has no {subset}, only {', '.join(sets)}")
        positions = [getattr(plan.args, f"max_{side}_positions", None) or 1024 for side in ("source", "target")]
        check_lengths(plan.path("text", "bpe"), plan.langs, options.max_tokens, dict(zip(plan.langs, positions)))
        if not can_resume(plan.path("checkpoints")):  # record and model of an earlier run
            for name, end in (("train", "jsonl"), ("averaged", "pt")):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(plan.path(f"{name}.{end}"), plan.path(f"{name}.before.{end}"))
        write_text(plan.path("trained-with.txt"), "\n".join(plan.run_record()) + "\n")
        write_text(plan.path("train.sh"), quote(plan.train_command) + "\n")
    await start_training(runner)
    if not runner.dry and not os.path.isfile(last):
        with open(runner.log, "a", encoding="utf-8") as stream:
            stream.write("fairseq-train ended without a checkpoint\n")
        raise Failed("fairseq-train ended without a checkpoint")


async def start_training(runner: Runner, watch: Watch | None = None) -> None:
    """Start the training processes of this machine; in a dry run, print the commands of all machines."""
    plan, place = runner.plan, runner.plan.place
    if not runner.dry and watch is None:
        args = plan.args
        watch = Train(plan.exp, (args.max_epoch, args.max_update, args.stop_time_hours), runner.display())
    environment = {} if runner.dry or plan.options.ngpu else allocator.environment()
    if environment:
        runner.say(f"  memory allocator: {environment['LD_PRELOAD']}")
    if place.nnodes == 1:
        await runner.run(*plan.train_command, watch=watch, environment=environment)
        return
    # after one process has ended, torchrun gives the others this time to save
    environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(nodes.GRACE)
    for rank in range(place.nnodes) if runner.dry else [place.rank]:
        if runner.dry:
            runner.say(f"# on machine {rank}:")
        words = [*place.launcher(rank, plan.processes, plan.options.wait_hours), *plan.train_command]
        await runner.run(*words, watch=watch, explain=nodes.explain, environment=environment)


async def average(runner: Runner) -> None:
    """Average the last checkpoints."""
    plan, options, out = runner.plan, runner.plan.options, runner.plan.path("averaged.pt")
    runner.need(plan.path("checkpoints", "checkpoint_last.pt"))
    every, found = options.average_updates, options.average
    if not runner.dry:
        pattern = "checkpoint_[0-9]*_[0-9]*.pt" if every else "checkpoint[0-9]*.pt"
        found = len(glob.glob(os.path.join(glob.escape(plan.path("checkpoints")), pattern)))
    if not found and every:
        raise UsageError(
            f"no checkpoint of every {every} updates (--average-updates) in {plan.path('checkpoints')}: train in "
            "another --exp with fewer, or use the last checkpoint with --average-updates 0"
        )
    wanted = min(options.average, found)
    if wanted <= 1:
        runner.say("  one checkpoint, nothing to average: using the last one")
        if not runner.dry:
            shutil.copyfile(plan.path("checkpoints", "checkpoint_last.pt"), out)
    else:
        if wanted < options.average:
            runner.say(f"  only {wanted} checkpoints exist: averaging these")
        choice = "--last-updates" if every else "--last"
        await runner.run("fairseq-deep", "average", choice, wanted, "--dir", plan.path("checkpoints"), "--output", out)
    if not runner.dry:
        write_text(plan.path("averaged.txt"), f"{max(wanted, 1)} {every}\n")


async def generate(runner: Runner) -> None:
    """Translate the test sets."""
    plan, options = runner.plan, runner.plan.options
    runner.need(plan.path("averaged.pt"))
    runner.need(plan.path("data-bin"))
    task = ["--decode-precision", options.decode_precision] if options.decode_precision != "fp32" else []
    task += ["--gnmt-lenpen"] * options.gnmt_lenpen
    for subset in plan.subsets:
        source = plan.path("text", "bpe", f"{subset}.{options.source_lang}")
        runner.need(source)
        watch = None if runner.dry else Generate(source, plan.path(f"generate-{subset}.txt"), runner.display())
        await runner.run(
            "fairseq-generate", plan.path("data-bin"), "--user-dir", os.path.join(ROOT, "fairseq_deep"),
            "--task", "deep_translation" if task else "translation", *task, "--source-lang", options.source_lang,
            "--target-lang", options.target_lang, "--path", plan.path("averaged.pt"), "--gen-subset", subset,
            "--beam", options.beam, "--lenpen", options.lenpen, "--max-len-a", options.max_len_a,
            "--max-len-b", options.max_len_b, "--batch-size", options.gen_batch, "--remove-bpe",
            *["sentencepiece"] * (options.bpe == "sentencepiece"), *["--cpu"] * (not options.ngpu), watch=watch,
        )  # fmt: skip
    if not runner.dry:
        record.write_search(plan.exp, options)


async def score(runner: Runner) -> None:
    """Score the translations with three procedures; sacreBLEU uses the untokenised reference if it exists."""
    plan, options = runner.plan, runner.plan.options
    cased = ["--lowercase"] * options.lowercase
    if options.multilingual and plan.subsets:
        await _score_pairs(runner, cased)
        return
    for subset in plan.subsets:
        output = plan.path(f"generate-{subset}.txt")
        runner.need(output)
        other = ["--against", options.against] if subset == "test" and options.against else []
        common = ["fairseq-deep", "score", "--generate-output", output]
        own = tokenizer_language(options.target_lang)
        lang = ["--lang", own] if own else []
        plain, tokenised = _references(runner, subset)
        await runner.run(
            *common, "--detokenize", options.target_lang, *lang, *cased,
            "--hypotheses", plan.path(f"{subset}.hyp.{options.target_lang}"), *plain, *other,
            "--json", plan.path(f"score-{subset}.json"),
        )  # fmt: skip
        for procedure in ("tokenized", "compound-split"):
            out = plan.path(f"score-{subset}-{procedure}.json")
            await runner.run(*common, f"--{procedure}", *cased, *tokenised, "--json", out)


def _references(runner: Runner, subset: str) -> tuple[list[str], list[str]]:
    """Return the flags of `score` for one or several references: plain, and tokenised."""
    plan, first = runner.plan, f"{subset}.{runner.plan.options.target_lang}"
    raw, bpe = plan.path("text", "raw"), plan.path("text", "bpe")
    # in a dry run there may be no text yet: count the files in --data
    folder = plan.options.data if runner.dry and plan.route == "folder" else raw
    count = len(glob.glob(os.path.join(glob.escape(folder), f"{first}.ref[0-9]*"))) if subset[:4] == "test" else 0
    copies = [plan.path(f"{subset}.ref{number}.{plan.options.target_lang}") for number in ("", *range(1, count + 1))]
    names = [first, *(f"{first}.ref{number}" for number in range(1, count + 1))]
    plain, tokenised = [], []
    for copy, name in zip(copies, names):
        plain += ["--references", copy]
        plain += ["--ref", os.path.join(raw, name)]
        tokenised += ["--ref", os.path.join(bpe, f"{name}.tok")]
    if not runner.dry:
        for path in glob.glob(os.path.join(glob.escape(plan.exp), f"{subset}.ref[0-9]*.{plan.options.target_lang}")):
            if path not in copies:  # left from a text with more references
                os.remove(path)
    return plain, tokenised


async def _score_pairs(runner: Runner, cased: list[str]) -> None:
    """Score each of many language pairs, then compute the means."""
    from .text import pairs

    plan, output, folder = runner.plan, runner.plan.path("generate-test.txt"), runner.plan.path("pairs")
    other = ["--against", os.path.join(plan.options.against, "pairs")] if plan.options.against else []
    runner.need(output)
    text = plan.path("text", "raw")
    runner.call("the translations are split into directions", pairs.split_translations, output, text, folder)
    words = ["--multilingual", folder, *cased, *other, "--json", plan.path("score-test.json")]
    await runner.run("fairseq-deep", "score", *words, watch=Echo())


STAGES: list[Stage] = [set_up, get_data, cut_text, binarise, train, average, generate, score]
