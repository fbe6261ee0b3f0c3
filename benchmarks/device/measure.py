"""The same steps on a real device: their time and the kernels that were launched, beside what was counted."""

import statistics
import time
from collections import Counter

import torch
from fairseq.sequence_generator import SequenceGenerator
from torch.profiler import ProfilerActivity, profile

from . import decoding, optimizer, training
from .report import DEVICES

WARM, ROUNDS = 3, 7
HOST_COPIES = ("Memcpy HtoD", "Memcpy DtoH")


def device_name(device):
    """The name of *device*, and the name in our table of what it is, None if it is not there."""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return name, next((known for known in DEVICES if known in name.replace(" ", "")), None)


def seconds(run, device):
    """Median time of *run*, by events of the device where it has some."""
    times = []
    for index in range(WARM + ROUNDS):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        else:
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        if index < WARM:
            times.clear()
    return statistics.median(times)


def kernels(run, device):
    """Launches of *run* without copies from and to the host; on a CPU, operations that call no other.

    Returns:
        "kernels": their number; "busy": the seconds that a GPU computed, whatever the host took (0 on a CPU); "names":
        launches and microseconds by name, the longest first
    """
    run()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    with profile(activities=activities) as profiler:
        run()
        if device == "cuda":
            torch.cuda.synchronize()
    if device == "cuda":
        on_device = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        found = [event for event in on_device if not event.name.startswith(HOST_COPIES)
                 and not getattr(event, "is_user_annotation", False)]  # fmt: skip
    else:
        found = [event for event in profiler.events() if event.name.startswith("aten::") and not event.cpu_children]
    launches, times = Counter(event.name for event in found), Counter()
    for event in found:
        times[event.name] += event.time_range.elapsed_us()
    busy = sum(times.values()) / 1e6 if device == "cuda" else 0.0
    names = {name: (launches[name], time) for name, time in times.most_common()}
    return {"kernels": len(found), "busy": busy, "names": names}


def measure_training(model, dictionary, device, tokens, length):
    model.train()
    model.set_num_updates(0)  # --compile begins with it
    batch = [part.to(device) for part in training.make_batch(dictionary, tokens, length)]

    def run():
        model.zero_grad(set_to_none=True)
        training.run_step(model, *batch, dictionary.pad())

    result = {"seconds": seconds(run, device), **kernels(run, device)}
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        run()
        result["peak"] = torch.cuda.max_memory_allocated()
    model.zero_grad(set_to_none=True)
    return result


def measure_update(model, device, name, precision, memory_efficient):
    wrapped = optimizer.build(model, name, precision, memory_efficient)
    gradients = [torch.zeros_like(parameter) for parameter in model.parameters()]

    def run():
        for parameter, gradient in zip(model.parameters(), gradients):
            parameter.grad = gradient
        optimizer.update(wrapped, words=4096, device=device)

    return {"seconds": seconds(run, device), **kernels(run, device)}


def measure_decoding(model, dictionary, device, sentences, beam, position):
    """Of one step: what so many steps around *position* take more than half as many before it."""
    source = training.make_batch(dictionary, sentences * decoding.LENGTH, decoding.LENGTH)[0].to(device)
    decoding.prepare_model(model, beam)
    steps = position // 2, position + position // 2
    results = []
    for length in steps:
        options = {"beam_size": beam, "max_len_a": 0, "max_len_b": length, "min_len": length}
        generator = SequenceGenerator([model], dictionary, **options)
        sample = {"net_input": {"src_tokens": source, "src_lengths": source.ne(dictionary.pad()).sum(1)}}

        def run(generator=generator, sample=sample):
            generator.generate([model], sample)

        results.append({"seconds": seconds(run, device), **kernels(run, device)})
    early, late = results
    return {name: (late[name] - early[name]) / (steps[1] - steps[0]) for name in ("seconds", "kernels", "busy")}
