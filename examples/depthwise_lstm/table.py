"""Put the systems of a comparison side by side: on the screen, in ``table.txt`` and in ``table.json``."""

import argparse
import json
import os
import re
import statistics

from corpus import die, run
from report import read_json

from fairseq_deep.tools import UserError, format_table, write_text

SPEED = re.compile(r"\(([\d.]+) sentences/s")
HEAD = ("system", "parameters", "updates", "valid loss", "valid ppl", "sacreBLEU", "step (s)", "decoding (sent/s)")


def training(exp):
    """Best validation loss with its perplexity, and the median seconds of an update, from ``train.jsonl``."""
    with open(os.path.join(exp, "train.jsonl"), encoding="utf-8") as stream:
        records = [json.loads(line) for line in stream]
    # A median, because the interval in which an epoch ends holds the validation too; words per batch and per second,
    # because they have more digits than the updates per second.
    steps = [
        float(record["wpb"]) / float(record["wps"])
        for record in records
        if record["kind"] == "train_inner" and float(record.get("wps", 0)) > 0
    ]
    valid = (record for record in records if record["kind"] == "valid")
    losses = [(float(record["valid_loss"]), float(record["valid_ppl"])) for record in valid]
    loss, ppl = min(losses, default=(None, None))
    return {"valid_loss": loss, "valid_ppl": ppl, "step_seconds": statistics.median(steps) if steps else None}


def decoding_speed(exp):
    """Sentences a second as fairseq-generate measured them: the last time that it was run."""
    with open(os.path.join(exp, "logs", "6-generate.log"), encoding="utf-8", errors="replace") as stream:
        found = SPEED.findall(stream.read())
    return float(found[-1]) if found else None


def system_row(folder, name):
    exp = os.path.join(folder, name)
    result = read_json(os.path.join(exp, "RESULT.json"))
    if not result:
        die(f"{exp}/RESULT.json is missing: run compare.sh again")
    kept = {key: result.get(key) for key in ("arch", "parameters", "updates", "epochs", "bleu", "signature")}
    return {"system": name, **kept, **training(exp), "sentences_per_second": decoding_speed(exp)}, result


def shared_facts(results):
    """What should be the same for all systems: one value, or all of them where it is not."""
    facts = {}
    for key in ("seed", "tokens_per_update", "precision", "devices", "hardware", "commit", "date"):
        values = list(dict.fromkeys(str(result.get(key)) for result in results))
        facts[key] = "; ".join(values)
    return facts


def cells(row):
    formats = {
        "parameters": ",d",
        "updates": ",d",
        "valid_loss": ".3f",
        "valid_ppl": ".2f",
        "bleu": ".2f",
        "step_seconds": ".3f",
        "sentences_per_second": ".1f",
    }
    return [row["system"], *("-" if row[key] is None else format(row[key], form) for key, form in formats.items())]


def compare(args):
    rows, results = zip(*(system_row(args.exp, name) for name in args.systems))
    facts = shared_facts(results)
    table = format_table([HEAD, *map(cells, rows)], right=range(1, len(HEAD)))
    note = "{tokens_per_update} tokens per update, seed {seed}, {precision}, {devices} ({hardware}), commit {commit}"
    text = f"{table}\n\n{note.format(**facts)}\n{rows[0]['signature']}\n"
    write_text(os.path.join(args.exp, "table.json"), json.dumps({"systems": rows, **facts}, indent=1) + "\n")
    write_text(os.path.join(args.exp, "table.txt"), text)
    print(f"\n{text}\n{os.path.join(args.exp, 'table.txt')}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exp", required=True, help="folder of the comparison")
    parser.add_argument("systems", nargs="+", help="its folders, in the order of the table")
    try:
        compare(parser.parse_args())
    except UserError as problem:
        die(problem)


if __name__ == "__main__":
    run(main)
