"""What ``torch.compile`` would launch: inductor's fusion with the rules of its GPU code, without generating code.

Each graph that dynamo captures is lowered and scheduled by inductor as if on a GPU. What it would launch, fused kernels
and calls of libraries, is what a call of the graph counts; the graph itself then runs as it is, uncounted.
"""

import contextlib
import copy
import functools
import logging
import re
from unittest import mock

import torch
from torch.utils._pytree import tree_map

from .count import Kernel, flop_registry, short_path
from .cuda_paths import HALF

logger = logging.getLogger(__name__)


class _Scheduled(Exception):
    """Inductor has decided what is one kernel; code is not needed."""


class Fusion:
    """A backend of ``torch.compile`` that counts.

    Args:
        counter: the :class:`~.count.Counter` that gets the kernels

    Attributes:
        graphs: how many were compiled
        unfused: of them, those that inductor could not lower; they are counted as they are
        calls: of graphs in what was counted
    """

    def __init__(self, counter):
        self.counter, self.graphs, self.unfused, self.calls = counter, 0, 0, 0

    def __call__(self, graph, inputs):
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor.decomposition import select_decomp_table

        compilers = {"fw_compiler": self.compile, "bw_compiler": self.compile}
        divide = functools.partial(min_cut_rematerialization_partition, compiler="inductor")
        return aot_autograd(**compilers, decompositions=select_decomp_table(), partition_fn=divide)(graph, inputs)

    def compile(self, graph, inputs):
        from functorch.compile import make_boxed_func

        self.graphs += 1
        launches = schedule(graph, inputs)
        if launches is None:
            self.unfused += 1
            return make_boxed_func(graph.forward)

        def run(*args):
            counter = self.counter
            if counter.counts:
                self.calls += 1
                counter.kernels.extend(launch._replace(phase=counter.phase) for launch in launches)
            with counter.paused():
                return graph.forward(*args)

        return make_boxed_func(run)


def on_cpu(graph, inputs):
    """A copy of *graph*, which was captured of tensors on the meta device, as of tensors on the CPU; and its inputs."""
    from torch._inductor.fx_passes.replace_random import replace_random_passes
    from torch._inductor.virtualized import V
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    def move(value):
        return torch.device("cpu") if isinstance(value, torch.device) else value

    graph = copy.deepcopy(graph)
    mode = next(value.fake_mode for value in inputs if isinstance(value, torch.Tensor))
    for node in graph.graph.nodes:
        node.args, node.kwargs = tree_map(move, node.args), tree_map(move, node.kwargs)
    with mode:
        inputs = [
            torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu")
            if isinstance(value, torch.Tensor)
            else value
            for value in inputs
        ]
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*inputs)
    with V.set_fake_mode(mode):
        replace_random_passes(graph)
    graph.recompile()
    return graph, inputs


def schedule(graph, inputs):
    """The launches of *graph*, a :class:`~.count.Kernel` each; None if inductor cannot lower it."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.scheduler import Scheduler

    found, half = [], any(isinstance(value, torch.Tensor) and value.dtype in HALF for value in inputs)

    def codegen(scheduler):
        found.extend(_kernel(node, half) for node in scheduler.nodes if _is_launch(node))
        raise _Scheduled

    graph, inputs = on_cpu(graph, inputs)
    fuses_as_on_a_gpu = config.patch(cpu_backend="triton", fx_graph_cache=False)
    with mock.patch.object(Scheduler, "codegen", codegen), fuses_as_on_a_gpu:
        try:
            compile_fx_inner(graph, inputs)
        except Exception as error:  # inductor puts what is raised into one of its own
            if _Scheduled.__name__ not in str(error):
                logger.warning("inductor cannot lower a graph: %s", str(error).strip().split("\n")[0])
                return None
    return found


def _is_launch(node):
    from torch._inductor import ir, scheduler

    return not isinstance(node, scheduler.NopKernelSchedulerNode) and not isinstance(node.node, ir.MultiOutput)


def _kernel(node, half):
    """What *node* of inductor's schedule launches; it belongs to the line of the first operation in it."""
    extern = getattr(node.node, "python_kernel_name", None)
    name = str(extern).removesuffix(".default").rsplit(".", 1)[-1] if extern else "fused"
    origins = [origin for part in node.get_nodes() for origin in part.node.get_origins()]
    where, line = _line_of(next(filter(None, (origin.meta.get("stack_trace") for origin in origins)), ""))
    flops = _flops(node, origins) if extern else 0
    return Kernel(name, int(node.get_read_write_buffers_sizes()), flops, half, "", where, line)


def _flops(node, origins):
    """Inductor knows those of products; those of attention are the counter's."""
    packets = [(origin, getattr(origin.target, "overloadpacket", None)) for origin in origins]
    attention = [(origin, packet) for origin, packet in packets if "attention" in str(packet)]
    if not attention:
        return int(node.estimate_flops() or 0)
    (origin, packet), values = attention[0], lambda arg: arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg
    flops = flop_registry[packet](*tree_map(values, origin.args), out_val=origin.meta["val"])
    return int(flops.node.hint if isinstance(flops, torch.SymInt) else flops)


def _line_of(trace):
    """Where in the source the innermost line of *trace* stands that is not torch's."""
    found = [row for row in re.findall(r'File "(.*)", line (\d+), in (.*)\n\s*(.*)', trace) if "/torch/" not in row[0]]
    if not found:
        return ("compiled", "", ""), 0
    name, line, function, text = found[-1]
    return (short_path(name), f"{function}, compiled", text), int(line)


def available():
    """Whether this torch has the parts of inductor that are used here."""
    try:
        from torch._inductor import config
        from torch._inductor.codegen import triton  # noqa: F401
    except ImportError:
        return False
    return hasattr(config, "cpu_backend")


def compile_model(model):
    """What is called in place of *model*: itself, if its own ``--compile`` is on, else compiled as a whole."""
    if getattr(model, "compiles", False):
        model.set_num_updates(0)  # as fairseq's trainer does; this is where it compiles
        return model
    return torch.compile(model, dynamic=True)


@contextlib.contextmanager
def counted(counter):
    """Within it, ``torch.compile`` counts into *counter* in place of compiling."""
    fusion, compile_ = Fusion(counter), torch.compile

    def compile(model=None, **options):
        return compile_(model, **{**options, "backend": fusion, "mode": None, "options": None})

    torch._dynamo.reset()
    with mock.patch.object(torch, "compile", compile):
        yield fusion
    torch._dynamo.reset()
