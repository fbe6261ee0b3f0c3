"""Whether a training that has begun may go on with another command: only how long it takes may change, and its noise.

``--before`` is the file with the command that it began with. What differs ends this with one line.
"""

import argparse
import os
import re
import shlex

from corpus import die, run

FREE = """
--user-dir --save-dir --max-epoch --max-update --stop-time-hours --stop-min-lr --num-workers --log-format --log-interval
--log-file --log-depth-interval --no-progress-bar --tensorboard-logdir --wandb-project --azureml-logging --aim-repo
--save-interval --save-interval-updates --keep-interval-updates --keep-interval-updates-pattern --keep-last-epochs
--keep-best-checkpoints --no-epoch-checkpoints --no-last-checkpoints --no-save --validate-interval
--validate-interval-updates --disable-validation --max-tokens-valid --batch-size-valid --patience --empty-cache-freq
--data-buffer-size --ddp-backend --distributed-world-size --distributed-backend --cpu --compile --checkpoint-activations
--write-checkpoints-asynchronously --on-divergence --max-tokens --update-freq
""".split()
"""Flags that do not change what is learned; batch and devices are compared as their product, elsewhere."""


def effective(words):
    """{flag: its value}, the last one of each, of the words of a fairseq-train command; "" for one without a value."""
    found, flag = {}, None
    for word in words[2:]:  # after the program and its data
        if re.match(r"--[a-zA-Z]", word):
            flag, _, value = word.partition("=")
            found[flag] = value
        elif flag:
            found[flag] = f"{found[flag]} {word}".strip()
    return {flag: value for flag, value in found.items() if flag not in FREE}


def difference(before, now):
    """How two commands differ, in words; empty if they train the same."""
    old, new = effective(before), effective(now)
    parts = []
    for flag in sorted(old.keys() | new.keys()):
        if old.get(flag) != new.get(flag):
            parts.append(f"{_words(flag, old)}, now {_words(flag, new)}")
    return "; ".join(parts)


def _words(flag, found):
    return f"{flag} {found[flag]}".strip() if flag in found else f"without {flag}"


def read_command(path):
    """The words of the command in *path*; empty if there is none."""
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as stream:
        return shlex.split(stream.read())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", required=True)
    parser.add_argument("--exp", required=True, help="the folder, as the message names it")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    before = read_command(args.before)
    changed = difference(before, args.command) if before else ""
    if changed:
        die(
            f"{args.exp} was trained with {changed}: give the same, use another --exp, "
            f"or delete {os.path.join(args.exp, 'checkpoints')} to train anew"
        )


if __name__ == "__main__":
    run(main)
