"""Totals of counts, a model of the time on named devices, and what both assume."""

from typing import NamedTuple

from fairseq_deep.tools import format_table


class Device(NamedTuple):
    """What a kernel costs: *launch* in seconds, memory in bytes a second, matrix products in flop a second."""

    launch: float
    bandwidth: float
    half: float
    single: float
    memory: float


# data sheets: dense products on tensor cores in half precision, fp32 without TF32, decimal gigabytes
DEVICES = {
    "V100-16GB": Device(5e-6, 0.90e12, 112e12, 14e12, 16e9),
    "V100-32GB": Device(5e-6, 0.90e12, 112e12, 14e12, 32e9),
    "RTX4090-24GB": Device(4e-6, 1.01e12, 165e12, 82.6e12, 24e9),
    "A100-80GB": Device(4e-6, 2.04e12, 312e12, 19.5e12, 80e9),
    "H100-80GB": Device(4e-6, 3.35e12, 989e12, 67e12, 80e9),
}
ASSUMPTIONS = """\
A kernel is an ATen operation that is no view, and each copy of an operand that CUDA cannot take as it lies; attention and
dropout are fused as on CUDA; each operand is read once and each result written once; flops are those of matrix products
and attention. Model time is the sum over kernels of max(launch, bytes / bandwidth, flop / peak): nothing overlaps, no host
is too slow, no synchronisation costs time. {name}: {launch:.0f} us, {bandwidth:.2f} TB/s, {half:.0f} TFLOP/s in half
precision, {single:.0f} in fp32 (data sheet: what is reached is less). fairseq's generator is counted at a step in which
no hypothesis ends."""


def model_time(kernels, device):
    """Seconds that *kernels* take on *device*."""
    return sum(
        max(device.launch, kernel.bytes / device.bandwidth, kernel.flops / (device.half if kernel.half else device.single))
        for kernel in kernels
    )


def totals(counter, device, phases=None):
    """Kernels, bytes, flops, model seconds and synchronisations, of some *phases* or all."""
    kernels = [kernel for kernel in counter.kernels if phases is None or kernel.phase in phases]
    syncs = [sync for sync in counter.syncs if phases is None or sync.phase in phases]
    return {
        "kernels": len(kernels),
        "bytes": sum(kernel.bytes for kernel in kernels),
        "flops": sum(kernel.flops for kernel in kernels),
        "seconds": model_time(kernels, device),
        "syncs": len(syncs),
    }


def sync_lines(counter):
    """Each line that waits for the device, with how often and its phase."""
    counts = {}
    for sync in counter.syncs:
        key = (sync.phase, f"{sync.where[0]}:{sync.line}", sync.where[2])
        counts[key] = counts.get(key, 0) + 1
    return [(str(count), *key) for key, count in counts.items()]


def ratio(value, base):
    return f"{value / base:.3f}" if base else "-"


def assumptions(name):
    device = DEVICES[name]
    return ASSUMPTIONS.format(name=name, launch=device.launch * 1e6, bandwidth=device.bandwidth / 1e12,
                              half=device.half / 1e12, single=device.single / 1e12)  # fmt: skip


def print_totals(what, results, against, phases):
    """A row a model: kernels (also by phase), bytes, flops, model time and synchronisations, with ratios."""
    base = results[against][what]
    rows = [(what, *phases, "kernels", "ratio", "GB", "ratio", "TFLOP", "ms", "ratio", "syncs")]
    for name, result in results.items():
        row = result[what]
        cells = [name, *(str(row["phases"][phase]["kernels"]) for phase in phases)]
        for key, scale, digits in (("kernels", 1, 0), ("bytes", 1e9, 2), ("flops", 1e12, 3), ("seconds", 1e-3, 2)):
            cells.append(f"{row[key] / scale:,.{digits}f}")
            if key != "flops":
                cells.append(ratio(row[key], base[key]))
        rows.append((*cells, str(row["syncs"])))
    print("\n" + format_table(rows, right=range(1, len(rows[0]))))


def print_details(title, row, options):
    """The lines that wait for the device; where they are asked for, kernels by operation and by line."""
    for sync in row["syncs_by_line"]:
        print(f"{title}: waits {sync[0]} x in {sync[1]} at {sync[2]}: {sync[3]}")
    if options.by_op:
        rows = [("operation", "kernels", "MB"), *((op, str(n), f"{b / 1e6:.1f}") for op, n, b, _ in row["by_op"])]
        print(f"\n{title}\n" + format_table(rows, right=(1, 2)))
    if options.by_line:
        rows = [("kernels", "MB", "function", "line")]
        for file, function, text, kernels, moved, _ in row["by_line"]:
            rows.append((str(kernels), f"{moved / 1e6:.1f}", f"{file} {function}", text))
        print(f"\n{title}\n" + format_table(rows, right=(0, 1)))
