"""What fuses already: cuBLASLt behind PyTorch's own functions, and ``torch.compile``.

    >>> coverage = cover(tree, "bf16", traffic)
    >>> coverage.cublaslt, coverage.complete
    ('torch._addmm_activation', True)

PyTorch reaches cuBLASLt's epilogues by three calls, each with a single output of the matrices' dtype:

=============================================  ==================================
``F.linear(x, weight, bias)``                  ``acc``, ``acc + bias[n]``
``torch._addmm_activation(bias, x, weight.T)`` ``relu(acc + bias[n])``; with ``use_gelu=True`` ``gelu_tanh``
``torch.addmm(matrix, x, weight.T)``           ``acc + matrix[m, n]``
=============================================  ==================================

They round once, so they do not compute a tree that rounds where eager PyTorch does, but for what leaves no second
rounding: ``rounding="eager"`` has ``F.linear(x, weight)``, ``rounding="eager_linear"`` its bias and relu too.

``torch.compile`` puts the whole elementwise tail into one Triton kernel after the GEMM.  With
``mode="max-autotune"`` it may put it into a Triton GEMM, where that beats cuBLAS and a second kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from epilogues.analysis import Traffic
from epilogues.analysis.traffic import linear_bias
from epilogues.tree import Accumulator, Apply, EpilogueTree, Kind, Node, Operand

from .units import in_bytes

_ACTIVATIONS = {"relu": "", "gelu_tanh": ", use_gelu=True"}


@dataclass(frozen=True)
class Coverage:
    """What others fuse of a tree.

    Attributes:
        complete: whether one call of PyTorch's computes all of it in one kernel.
        cublaslt: that call, or the one that computes the beginning.
        remaining: the operations that eager PyTorch runs after it.
        compiled_extra: bytes that ``torch.compile`` moves more than one fused kernel.
    """

    complete: bool
    cublaslt: str
    remaining: tuple[str, ...]
    compiled_extra: int

    @property
    def cublaslt_words(self) -> str:
        if self.complete:
            return f"covers all of it: {self.cublaslt}"
        return f"covers the beginning only, {self.cublaslt}; what remains: {', '.join(self.remaining)}"

    @property
    def compile_words(self) -> str:
        if not self.remaining:
            return "has nothing left to fuse"
        return (
            "makes one Triton kernel of what follows the GEMM, which reads the product from memory again: "
            f'{in_bytes(self.compiled_extra)} more than one fused kernel. With mode="max-autotune" it may put all of '
            "it into a Triton GEMM, where that wins its timing"
        )


def cover(tree: EpilogueTree, element: str, traffic: Traffic) -> Coverage:
    """What cuBLASLt and ``torch.compile`` cover of a resolved tree; see the module's first page."""
    after = tuple(operation.name for operation in traffic.elementwise)
    extra = max(0, traffic.compiled_bytes - traffic.fused_bytes)
    call = _single_call(tree, element)
    if call is not None:
        return Coverage(True, call, after if call.startswith("torch._") else (), extra)
    bias = linear_bias(tree, element)
    beginning = "F.linear(x, weight)" if bias is None else f"F.linear(x, weight, {bias[1].name})"
    beginning = "torch.matmul(x, weight.t())" if tree.rounding == "eager" else beginning
    return Coverage(False, beginning, after, extra)


def _single_call(tree: EpilogueTree, element: str) -> str | None:
    if len(tree.outputs) != 1 or tree.outputs[0].dtype != element:
        return None
    value = tree.outputs[0].value
    if isinstance(value, Accumulator):
        return "F.linear(x, weight)"
    if not isinstance(value, Apply) or tree.rounding == "eager":
        return None
    if added := _added(value, Kind.ROW, element):
        return f"F.linear(x, weight, {added})"
    if tree.rounding == "once" and (added := _added(value, Kind.AUX, element)):
        return f"torch.addmm({added}, x, weight.T)"
    if tree.rounding != "once" and value.operation != "relu":
        return None
    if value.operation in _ACTIVATIONS and (added := _added(value.operands[0], Kind.ROW, element)):
        return f"torch._addmm_activation({added}, x, weight.T{_ACTIVATIONS[value.operation]})"
    return None


def _added(node: Node, kind: Kind, element: str) -> str | None:
    """The name of the operand of a kind that a value adds to the accumulator, if that is all it is."""
    if not isinstance(node, Apply) or node.operation != "add":
        return None
    match sorted(node.operands, key=lambda child: not isinstance(child, Accumulator)):
        case [Accumulator(), Operand() as operand] if operand.kind is kind and operand.dtype == element:
            return operand.name
    return None
