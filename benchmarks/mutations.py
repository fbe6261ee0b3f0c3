"""How many small faults in the methods the tests find: a random sample of mutations, by cosmic-ray.

    . tests/tools.sh && ensure_tools mutation      # cosmic-ray, in .venv/mutation
    .venv/bin/python benchmarks/mutations.py --sample 200 --seed 1 --out benchmarks/mutations.json

Each package of `TESTS` is copied with the tests into a folder of its own. cosmic-ray lists its mutations (operators of
arithmetic and comparison, numbers, conditions, exceptions, loops, decorators). A sample of them, in proportion to their
number, is applied one at a time, and the package's tests run until the first failure. A mutation that makes them fail,
or never end, is found. The script prints the share with its 95 % interval (Wilson), and each that is not found with its
diff. Those may be equivalent: a person decides, and writes why into ``equivalent`` of the file (`docs/design.md`).
"""

import argparse
import json
import math
import platform
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = {
    "core/aggregators": "aggregators half_precision running_sums lstm routing "
    "hyper_connections diagnostics layer_drop plain_pytorch inits snapshots dropout "
    "whole_models golden methods",
    "core/attention": "masks layer_options alignment decoding decoder_attentions languages "
    "golden generator steps compiled_steps whole_models methods device",
    "core/search": "generator batching device",
    "core/decoding": "int8 native decoding steps compiled_steps",
    "runtime/packaged": "packaged hostile_packages packages records package check",
    "core/inits": "inits admin golden residuals snapshots whole_models",
}
"""The test files of each package, those about it first: the first failure ends a run."""
SAME = re.compile(r"_(Eq_Is|NotEq_IsNot|Is_Eq|IsNot_NotEq)$")
"""Operators that change nothing here: identity and equality of None, of short strings and of small integers."""
TIMEOUT = 300
"""Seconds, several times what the tests of any package take."""
CONFIG = """[cosmic-ray]
module-path = "fairseq_deep/{package}"
timeout = {timeout}.0
excluded-modules = []
test-command = "{python} -m pytest -x -q -p no:xdist -p no:cacheprovider {tests}"

[cosmic-ray.distributor]
name = "local"
"""


def copy_to(folder):
    """Copy what git knows of the working tree."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def cosmic_ray(folder, *words):
    return subprocess.run(["cosmic-ray", *words], cwd=folder, capture_output=True, text=True, check=True).stdout


def test_file(folder, name):
    """The path of the tests *name*, which are in a folder of what they test."""
    path = min(folder.glob(f"tests/*/test_{name}.py"), default=None)
    if path is None:
        raise SystemExit(f"there is no tests/*/test_{name}.py; correct TESTS")
    return str(path.relative_to(folder))


def prepare(package, folder):
    """List the mutations of *package*; return their numbers in a fixed order."""
    copy_to(folder)
    tests = " ".join(test_file(folder, name) for name in TESTS[package].split())
    config = CONFIG.format(package=package, timeout=TIMEOUT, python=sys.executable, tests=tests)
    (folder / "mutations.toml").write_text(config)
    cosmic_ray(folder, "baseline", "mutations.toml")  # fails where the tests do without a mutation
    cosmic_ray(folder, "init", "mutations.toml", "mutations.sqlite")
    with sqlite3.connect(folder / "mutations.sqlite") as session:
        columns = "module_path, start_pos_row, start_pos_col, operator_name, occurrence"
        rows = session.execute(f"select job_id, operator_name from mutation_specs order by {columns}")
        return [job for job, operator in rows if not SAME.search(operator)]


def keep(folder, chosen):
    """Leave only the mutations *chosen* in the session."""
    marks = ", ".join("?" * len(chosen))
    with sqlite3.connect(folder / "mutations.sqlite") as session:
        for table in ("mutation_specs", "work_items"):
            session.execute(f"delete from {table} where job_id not in ({marks})", chosen)


def results(package, folder):
    """Return a record for each mutation that was tried."""
    found = []
    for line in cosmic_ray(folder, "dump", "mutations.sqlite").splitlines():
        item, result = json.loads(line)
        (mutation,) = item["mutations"]
        outcome = result["test_outcome"] if result else "not run"
        row, name = mutation["start_pos"][0], Path(mutation["module_path"]).name
        record = {"where": f"{package}/{name}:{row}", "operator": mutation["operator_name"], "outcome": outcome}
        found.append({**record, "diff": result["diff"]} if outcome == "survived" else record)
    return found


def interval(found, tried):
    """Wilson's 95 % interval of a share."""
    z, share = 1.96, found / tried
    middle = share + z * z / (2 * tried)
    width = z * math.sqrt(share * (1 - share) / tried + z * z / (4 * tried * tried))
    return [(middle - width) / (1 + z * z / tried), (middle + width) / (1 + z * z / tried)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=200, help="mutations to try (default: 200)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--packages", nargs="+", choices=TESTS, default=[*TESTS])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if shutil.which("cosmic-ray") is None:
        parser.error("there is no cosmic-ray in PATH; run: . tests/tools.sh && ensure_tools mutation")
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    record = {"commit": head.stdout.strip(), "python": platform.python_version(), "seed": args.seed, "tried": []}
    with tempfile.TemporaryDirectory() as work:
        folders = {package: Path(work, package) for package in args.packages}
        listed = {package: prepare(package, folder) for package, folder in folders.items()}
        record["mutations"] = {package: len(jobs) for package, jobs in listed.items()}
        total = sum(record["mutations"].values())
        for package, jobs in listed.items():
            count = min(len(jobs), round(args.sample * len(jobs) / total))
            keep(folders[package], random.Random(args.seed).sample(jobs, count))
            cosmic_ray(folders[package], "exec", "mutations.toml", "mutations.sqlite")
            record["tried"] += results(package, folders[package])
            args.out.write_text(json.dumps(record, indent=1) + "\n")
            print(f"{package}: {count} of {len(jobs)}", flush=True)
    tried = [each for each in record["tried"] if each["outcome"] in ("killed", "survived")]
    killed = sum(each["outcome"] == "killed" for each in tried)
    low, high = interval(killed, len(tried))
    print(f"{killed} of {len(tried)} found: {100 * killed / len(tried):.1f} % [{100 * low:.1f}, {100 * high:.1f}]")
    for each in tried:
        if each["outcome"] == "survived":
            print(f"\n{each['where']} {each['operator']}\n{each['diff']}")


if __name__ == "__main__":
    main()
