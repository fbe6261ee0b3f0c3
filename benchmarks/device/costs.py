"""What a kernel moves, which operands CUDA copies before it, and how many kernels an operation of lists is."""

import math

import torch

from .values import mutated, tensors_in

aten = torch.ops.aten
PRODUCTS = {aten.mm: (0, 1), aten.addmm: (1, 2), aten.bmm: (0, 1), aten.baddbmm: (1, 2)}  # their matrices
WANTS_CONTIGUOUS = {
    aten.native_layer_norm: (0,),
    aten.native_layer_norm_backward: (0, 1),
    aten._softmax: (0,),
    aten._log_softmax: (0,),
    aten._softmax_backward_data: (0, 1),
    aten._log_softmax_backward_data: (0, 1),
}
ATTENTION_BACKWARD = tuple(
    getattr(aten, f"_scaled_dot_product_{kind}_attention_backward", None) for kind in ("flash", "efficient")
)
READS_PART = (aten.embedding, aten.index_select, aten.gather, aten.index)  # of the first operand, what they return
WRITES_PART = (aten.index_put_, aten.scatter_, aten.scatter_add_, aten.index_add_, aten.index_copy_)  # of the first
WRITES_ONLY = (aten.copy_, aten.fill_, aten.zero_)
# statistics, then the values; and of the gradients those of input, weight and bias
LAUNCHES = {aten.native_group_norm: 2, aten.native_group_norm_backward: 3}
# of one launch over lists of tensors: elements of a chunk, chunks, and tensors by the number of lists
CHUNK, CHUNKS, TENSORS = 65536, 320, {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}


def size(tensor):
    """Bytes of the elements that there are; what is expanded is there once."""
    elements = math.prod(n for n, stride in zip(tensor.size(), tensor.stride()) if stride) if tensor.numel() else 0
    return elements * tensor.element_size()


def _is_matrix(tensor):
    """Whether cuBLAS takes the last two dimensions as they lie: as rows, or as columns."""
    (rows, columns), (row, column) = tensor.shape[-2:], tensor.stride()[-2:]
    by_rows = (column == 1 or columns == 1) and (row >= columns or rows == 1)
    by_columns = (row == 1 or rows == 1) and (column >= rows or columns == 1)
    return by_rows or by_columns


def copied_operands(packet, args):
    """The operands that CUDA copies before *packet* can work on them."""
    if packet in PRODUCTS:
        return [args[index] for index in PRODUCTS[packet] if not _is_matrix(args[index])]
    if packet in ATTENTION_BACKWARD:
        return [args[0]] if not args[0].transpose(1, 2).is_contiguous() else []
    return [args[index] for index in WANTS_CONTIGUOUS.get(packet, ()) if not args[index].is_contiguous()]


def bytes_moved(func, args, kwargs, given, results):
    """What a kernel reads and writes."""
    packet, sizes = func._overloadpacket, [size(tensor) for tensor in given]
    if packet in READS_PART:
        return 2 * sum(map(size, results)) + sum(sizes[1:])
    if packet in WRITES_PART:
        return 2 * sum(sizes[1:])
    written = sum(map(size, results)) or sum(size(tensor) for tensor in tensors_in(mutated(func, args, kwargs)))
    return written + sum(sizes[1:] if packet in WRITES_ONLY else sizes)


def list_launches(lists):
    """Kernels of an operation over *lists* of tensors: torch's multi_tensor_apply."""
    limit, launches, tensors, chunks = TENSORS[min(len(lists), 5)], 0, 0, 0
    for tensor in lists[0]:
        tensors, left = tensors + 1, math.ceil(tensor.numel() / CHUNK)
        while left:
            taken = min(left, CHUNKS - chunks)
            left, chunks = left - taken, chunks + taken
            if chunks == CHUNKS or (tensors == limit and not left):
                launches, chunks, tensors = launches + 1, 0, 1 if left else 0
    return launches + (chunks > 0)
