"""What a recipe leaves of an experiment, in small."""

import json

SCORE = {"bleu": 12.345, "chrf": 40.5, "brevity_penalty": 0.98, "sentences": 4, "signature": "nrefs:1|tok:13a"}
COMPARED = {"other": {"score": 10.0}, "ours": {"score": 12.345}, "difference": 2.345, "p": 0.0123}
AGAINST = {"system": "exp/other", "resamples": 1000, "seed": 12345, "measures": {"BLEU": COMPARED}}
RECORD = {
    "bleu": 12.345,
    "chrf": 40.5,
    "parameters": 1234567,
    "updates": 20,
    "hardware": "2 cores",
    "arch": "transformer_dlcl_30l",
    "beam": 4,
    "commit": "abc123",
    "data": {"route": "DIR", "sets": {"train": {"pairs": 22000, "sha256": {"en": "e" * 64, "de": "d" * 64}}}},
    "environment": {"torch": "2.13.0"},
    "scores": {"test": {"sacrebleu": {**SCORE, "against": AGAINST}}},
}
LOGS = [{"time": 5.0, "session": 1, "epoch": 1, **entry} for entry in (
    {"kind": "train_inner", "num_updates": "10", "loss": "9.5", "ppl": "724.1", "lr": "0.001", "gnorm": "2.5"},
    {"kind": "train_inner", "num_updates": "20", "loss": "8.25", "ppl": "304.4", "lr": "0.002", "gnorm": "1.5"},
    {"kind": "valid", "valid_num_updates": "20", "valid_loss": "8.5", "valid_ppl": "362"},
)]  # fmt: skip
TEXTS = {
    "text/raw/test.en": ["the <i>house</i>", "a tree", "rain", "snow"],
    "test.hyp.de": ["das <script>alert(1)</script>", "", "Regen", "Schnee"],
    "test.ref.de": ["das Haus", "ein Baum", "Regen", "Schnee"],
}
GENERATED = """S-1\tthe hou@@ se
T-1\tdas Haus
H-1\t-0.5\tdas Ha@@ us
D-1\t-0.5\tdas Ha@@ us
A-1\t0-0 1-1 2-2
S-0\ta tree
T-0\tein Baum
H-0\t-0.5\tein Baum
D-0\t-0.5\tein Baum
A-0\t0-0 0-1 1-2
"""


def make_run(folder, record=RECORD, texts=TEXTS):
    folder.mkdir(parents=True)
    command = "fairseq-train data-bin --source-lang en --target-lang de --lr 1 --bf16 --lr=0.002 --plugins a b"
    (folder / "train.sh").write_text(command + "\n")
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in LOGS))
    for name, lines in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(line + "\n" for line in lines))
    if record is not None:
        (folder / "RESULT.json").write_text(json.dumps(record))
    return folder
