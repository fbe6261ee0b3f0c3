"""The training settings of claims, by scale and by group of claims."""

# flags of compare's run.sh, and flags of fairseq-train (after "--"), by scale and group
SCALES = {
    "mini": {
        "pre": (
            "--conf mini --max-tokens 512 --batch-tokens 512 --bpe-merges 4000 --updates 3000 --gen-batch 100",
            "--dropout 0.1 --fast-dropout --lr 0.002 --warmup-updates 600",
        ),
        "depth": (
            "--conf mini --max-tokens 512 --batch-tokens 512 --bpe-merges 4000 --updates 3000 --gen-batch 100 "
            "--tune lr --tune-seed 11",
            "--dropout 0.1 --fast-dropout --lr 0.002 --warmup-updates 600",
        ),
        "post": (
            "--conf mini --max-tokens 512 --batch-tokens 512 --bpe-merges 4000 --updates 3000 --gen-batch 100",
            "--dropout 0.1 --fast-dropout --lr 0.001 --warmup-updates 1000",
        ),
        "deep": (
            "--conf mini --max-tokens 512 --batch-tokens 512 --bpe-merges 4000 --updates 1500 --translate false",
            "--dropout 0.1 --fast-dropout --lr 0.0005 --warmup-updates 400",
        ),
    },
    "base": {
        "pre": ("--conf base --updates 15000", "--dropout 0.1"),
        "depth": ("--conf base --updates 15000 --tune lr --tune-seed 11", "--dropout 0.1"),
        "post": ("--conf base --updates 15000", "--dropout 0.1 --lr 0.0007"),
        "deep": ("--conf base --updates 4000 --translate false", "--dropout 0.1 --lr 0.0005"),
    },
}
WIDTHS = {"mini": 128, "base": 512}
