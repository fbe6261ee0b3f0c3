"""Totals of counts, a model of the time on named devices, the tables, and what they assume."""

from typing import NamedTuple

from fairseq_deep.tools.tables import format_table


class Device(NamedTuple):
    """What a kernel costs: *launch* in seconds, *bandwidth* in bytes a second, products in flop a second."""

    launch: float
    bandwidth: float
    half: float
    single: float


# data sheets: dense products in half precision on tensor cores, fp32 without TF32
DEVICES = {
    "V100": Device(5e-6, 0.90e12, 112e12, 14e12),
    "RTX4090": Device(4e-6, 1.01e12, 165e12, 82.6e12),
    "A100": Device(4e-6, 2.04e12, 312e12, 19.5e12),
    "H100": Device(4e-6, 3.35e12, 989e12, 67e12),
}
CAPACITIES = {"16 GB": 16e9, "24 GB": 24e9, "80 GB": 80e9}
ASSUMPTIONS = """\
Kernels: ATen's operations that are no views, and the copies of operands that CUDA cannot take as they lie; attention
and dropout are fused as on CUDA. Each operand is read once, each result written once. Flops: matrix products and
attention, a causal one in full. Decoding: fairseq's generator, at a step at which no hypothesis ends.
Model time: the sum over kernels of max(launch, bytes / bandwidth, flops / peak). Nothing overlaps, synchronisations
cost nothing, the host is never late, data sheets are reached; so ratios mean more than times.
On paper: 6 flops a word and parameter of a matrix in training, 2 in decoding, attention beside it. Floor: what matrix
products and attention take alone, without launches, with all else fused into them.
Memory: storages alive at once in forward and backward, parameters, gradients and the optimizer's state; 1 GB is left
for CUDA itself."""


def model_time(kernels, device):
    """Seconds that *kernels* take on *device*."""
    return sum(max(device.launch, _work(kernel, device)) for kernel in kernels)


def _work(kernel, device):
    return max(kernel.bytes / device.bandwidth, kernel.flops / (device.half if kernel.half else device.single))


def totals(counter, phases=None):
    """Kernels, bytes, flops, synchronisations and model seconds by device, of some *phases* or all."""
    kernels = [kernel for kernel in counter.kernels if phases is None or kernel.phase in phases]
    products = [kernel for kernel in kernels if kernel.flops]
    return {
        "kernels": len(kernels),
        "bytes": sum(kernel.bytes for kernel in kernels),
        "flops": sum(kernel.flops for kernel in kernels),
        "seconds": {name: model_time(kernels, device) for name, device in DEVICES.items()},
        "syncs": sum(phases is None or sync.phase in phases for sync in counter.syncs),
        "product_bytes": sum(kernel.bytes for kernel in products),
        "floor_seconds": {name: sum(_work(kernel, device) for kernel in products) for name, device in DEVICES.items()},
    }


def sync_lines(counter):
    """[phase, file:line, its text, how often] of each line that waits for the device."""
    counts = {}
    for sync in counter.syncs:
        key = (sync.phase, f"{sync.where[0]}:{sync.line}", sync.where[2])
        counts[key] = counts.get(key, 0) + 1
    return [[*key, count] for key, count in counts.items()]


def _ratio(value, base):
    return f"{value / base:.3f}" if base else "-"


def print_totals(what, results, against, phases, devices):
    """A row a model: kernels (also by phase), bytes, flops, synchronisations and model times, with ratios."""
    base = results[against][what]
    times = [cell for device in devices for cell in (f"ms {device}", "ratio")]
    rows = [(what, *(phases if len(phases) > 1 else ()), "kernels", "ratio", "syncs", "GB", "ratio", "TFLOP", *times)]
    for name, result in results.items():
        row = result[what]
        cells = [name, *(str(row["phases"][phase]["kernels"]) for phase in phases if len(phases) > 1)]
        cells += [f"{row['kernels']:,}", _ratio(row["kernels"], base["kernels"]), str(row["syncs"])]
        cells += [f"{row['bytes'] / 1e9:.2f}", _ratio(row["bytes"], base["bytes"]), f"{row['flops'] / 1e12:.3f}"]
        for device in devices:
            seconds = row["seconds"][device]
            cells += [f"{1e3 * seconds:.2f}", _ratio(seconds, base["seconds"][device])]
        rows.append(cells)
    _print(rows)


def print_floors(what, results, devices):
    """What products and attention take alone, and flops on paper, beside what is reached."""
    rows = [(f"{what}: floors", "TFLOP on paper", "reached", "GB of products", "of all")]
    rows[0] += tuple(cell for device in devices for cell in (f"ms {device}: floor", "model", "share"))
    for name, result in results.items():
        row = result[what]
        cells = [name, f"{row['flops_on_paper'] / 1e12:.3f}", f"{row['flops'] / 1e12:.3f}"]
        cells += [f"{row['product_bytes'] / 1e9:.2f}", f"{row['bytes'] / 1e9:.2f}"]
        for device in devices:
            floor, seconds = row["floor_seconds"][device], row["seconds"][device]
            cells += [f"{1e3 * floor:.2f}", f"{1e3 * seconds:.2f}", f"{floor / seconds:.0%}"]
        rows.append(cells)
    _print(rows)


def print_measured(whats, results, against, device):
    """Measured times and launches beside those of the model; *device*: its name, and its name in our table."""
    name, known = device
    head = f"measured: {name}", "ms", "ratio", "GPU busy, ms", f"ms model ({known})", "off by"
    rows = [(*head, "launches", "counted", "off by")]
    for what in whats:
        for row, result in results.items():
            got, counted = result["measured"][what], result[what]
            base = results[against]["measured"][what]["seconds"]
            cells = [f"{row}, {what}", f"{1e3 * got['seconds']:.2f}", _ratio(got["seconds"], base)]
            model = counted["seconds"][known] if known else 0.0
            busy = f"{1e3 * got['busy']:.2f}" if known else "-"
            cells += [busy, f"{1e3 * model:.2f}" if known else "-", _ratio(got["seconds"], model)]
            cells += [f"{got['kernels']:,.0f}", f"{counted['kernels']:,}", _ratio(got["kernels"], counted["kernels"])]
            rows.append(cells)
    _print(rows)


def print_memory(results):
    rows = [("memory", "GB fixed", "kB a word", *(f"words in {name}" for name in CAPACITIES))]
    for name, result in results.items():
        for label, key in ((name, "memory"), ("  with recomputation", "memory_recomputed")):
            fixed, word, words = result[key]
            rows.append((label, f"{fixed / 1e9:.2f}", f"{word / 1e3:.0f}", *(f"{count:,}" for count in words)))
    _print(rows)


def print_syncs(whats, results):
    """Each line that waits for the device, with how often in which row."""
    lines = {}
    for name, result in results.items():
        for what in whats:
            for phase, line, text, count in result[what]["syncs_by_line"]:
                lines.setdefault((phase, line, text), {})[name] = count
    rows = [("waits for the device", "line", "", "how often")]
    for key, counts in lines.items():
        same = len(counts) == len(results) and len(set(counts.values())) == 1
        often = f"{min(counts.values())} each" if same else ", ".join(f"{n} {name}" for name, n in counts.items())
        rows.append((*key, often))
    _print(rows, right=())


def print_groups(name, row, options):
    """Kernels by operation and by line of the source, where they are asked for."""
    if options.by_op:
        rows = [(f"{name}: operation", "kernels", "MB")]
        _print([*rows, *((op, str(count), f"{moved / 1e6:.1f}") for op, count, moved, _ in row["by_op"])])
    if options.by_line:
        rows = [("kernels", "MB", f"{name}: function", "line")]
        for file, function, text, count, moved, _ in row["by_line"]:
            rows.append((str(count), f"{moved / 1e6:.1f}", f"{file} {function}", text))
        _print(rows, right=(0, 1))


def print_changes(name, changes):
    """What :func:`changed_lines` found."""
    rows = [("kernels", "before", f"{name}: function", "line")]
    rows += [(str(now), str(before), f"{file} {function}", text) for (file, function, text), before, now in changes]
    _print(rows if changes else [(f"{name}: each line has the kernels that it had",)], right=(0, 1) if changes else ())


def changed_lines(before, now):
    """((file, function, text), kernels before, kernels now) of the lines that differ, the largest change first.

    Args:
        before, now: [file, function, text, kernels, ...] of each line
    """
    old, new = ({tuple(row[:3]): row[3] for row in rows} for rows in (before, now))
    keys = [key for key in {**old, **new} if old.get(key, 0) != new.get(key, 0)]
    rows = [(key, old.get(key, 0), new.get(key, 0)) for key in keys]
    return sorted(rows, key=lambda row: (-abs(row[2] - row[1]), row[0]))


def print_assumptions(devices):
    print("\n" + ASSUMPTIONS)
    for name in devices:
        device = DEVICES[name]
        print(
            f"{name}: {device.launch * 1e6:.0f} us a launch, {device.bandwidth / 1e12:.2f} TB/s, "
            f"{device.half / 1e12:.0f} TFLOP/s in half precision, {device.single / 1e12:.0f} in fp32."
        )


def _print(rows, right=None):
    print("\n" + format_table(rows, right=range(1, len(rows[0])) if right is None else right))
