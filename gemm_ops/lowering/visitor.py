"""Builds the interface's DAG IR for a tree and emits the epilogue visitor: its types and its arguments.

    >>> visitor = lower(tree, "sm90")
    >>> visitor.root, visitor.arguments
    ('EVTValue0', '{{}, {static_cast<...>(args.operands[0].data), ...}, {}}')

Contract with the kernel templates: ``functors`` and ``types`` are C++ declarations, in that order; ``root`` is
the visitor's type; ``arguments`` initialises ``root``'s ``Arguments`` from a ``GemmArguments const& args``
(:mod:`gemm_ops.runtime.abi`).  On SM90 the types need ``EpilogueDescriptor`` declared before them, on SM80
``OutputTileThreadMap``.  On SM90 the main output D belongs to the collective and not to the visitor; on SM80
the visitor's root stores it.

The graph of one tree: a load per operand, per stage (:mod:`.stages`) one compute node and one store.  Every
auxiliary store is an input of the main output's compute node, whether it reads the value or not, so the graph
has a single sink; without that the interface's passes fail on SM80 and drop stores on SM90.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from epilogues.dtypes import torch_dtype
from epilogues.tree import Accumulator, EpilogueTree, Kind, Node, Operand

from ..kernels.access import ALIGNED, STRIDED, WHOLE, Access
from .functors import functor_source, variant_of
from .interface import load_interface
from .stages import Stage, split_stages

#: C++ element types by short dtype name.
ELEMENTS = {"f32": "float", "f16": "cutlass::half_t", "bf16": "cutlass::bfloat16_t"}

_COMPUTE_CAPABILITY = {"sm90": 90, "sm80": 80}
# Example extents: only which strides are 0 or 1 can be read off the types.
_M, _N = 16, 32


@dataclass(frozen=True)
class VisitorSource:
    """The C++ of an epilogue visitor; see the module's contract."""

    functors: str
    types: str
    root: str
    arguments: str


def lower(tree: EpilogueTree, family: str, access: Access = ALIGNED, *, swapped: bool = False) -> VisitorSource:
    """Lowers a resolved tree for a kernel family ("sm90" or "sm80"), its matrices reached as ``access`` says.

    Args:
        swapped: whether the kernel computes the transpose of the outputs: row operands become columns, and matrices are
            contiguous along their first mode (SM90, with all matrices whole).

    Raises:
        ToolchainError: if the CUTLASS Python interface cannot be imported.
    """
    cppgen = load_interface()
    stages = split_stages(tree)
    assert not swapped or (family == "sm90" and not any((*access.operands, *access.outputs)))
    frontend = _build_graph(cppgen, tree, stages, _COMPUTE_CAPABILITY[family], swapped)
    graph = frontend.dag_ir
    _set_functors(cppgen, graph, family)
    if family == "sm90":
        _set_direct_access(cppgen, graph, tree, access)
    callbacks = cppgen.FusionCallbacks(graph, frontend.cc, emit_CD=family == "sm80")
    types, root = callbacks.emit()
    # the emitter ends template argument lists with a comma
    types = re.sub(r",(\s*>)", r"\1", types)
    arguments = _Initialisers(cppgen, tree, graph, access, swapped).of(_root_node(graph, family))
    if family == "sm90" and access.output(0) != WHOLE:
        # D by the visitor, as its last node
        store = _direct_store("DirectD", str(tree.outputs[0].dtype), access.output(0))
        types += f"{store}\nusing EVTDirectD = cutlass::epilogue::fusion::Sm90EVT<DirectD, {root}>;\n"
        root, arguments = "EVTDirectD", f"{{{arguments}, {_output_arguments(tree, 0, access, swapped)}}}"
    if access.batched:
        types = _with_batch_strides(types)
    variant = variant_of(tree)
    return VisitorSource(
        functors="\n".join(functor_source(stage, f"Functor{stage.index}", variant) for stage in stages),
        types=types,
        root=root,
        arguments=arguments,
    )


def _build_graph(cppgen: Any, tree: EpilogueTree, stages: tuple[Stage, ...], cc: int, swapped: bool) -> Any:
    """The interface's frontend, its passes run over the tree's graph."""
    frontend = cppgen.EVTFrontendBase(cc)
    frontend.add_load_node("accum", torch.empty(_M, _N, dtype=torch.float32))
    for operand in tree.operands:
        frontend.add_load_node(f"operand_{operand.position}", _example(cppgen, operand, swapped))
    producers: dict[int, str] = {}  # id of a stored value -> the store, which passes the value on unrounded
    auxiliary: list[str] = []
    for stage in stages:
        is_main = stage.index == 0
        value, store = f"value_{stage.index}", "D" if is_main else f"output_{stage.index}"
        # any operation will do here: the functor takes its place after the passes
        frontend.add_compute_node(cppgen.FunctionalOp.Plus, name=value)
        inputs = [_leaf_name(leaf, producers) for leaf in stage.leaves]
        if is_main:
            inputs += [name for name in auxiliary if name not in inputs]
        for weight, name in enumerate(inputs):
            frontend.add_edge(name, value, weight=weight)
        frontend.add_store_node(store)
        frontend.add_edge(value, store)
        assert stage.output.dtype is not None, "lowering takes resolved trees"
        frontend.set_store_tensor(store, _matrix(cppgen, torch_dtype(stage.output.dtype), swapped))
        frontend.mark_output(store)
        producers[id(stage.output.value)] = store
        if not is_main:
            auxiliary.append(store)
    frontend.parse = lambda: None  # what trace() would call to build the graph that is there already
    frontend.trace()
    return frontend


def _leaf_name(leaf: Node, producers: dict[int, str]) -> str:
    if isinstance(leaf, Operand):
        return f"operand_{leaf.position}"
    # an accumulator that is also stored is read from the accumulator
    return "accum" if isinstance(leaf, Accumulator) else producers[id(leaf)]


def _example(cppgen: Any, operand: Operand, swapped: bool) -> Any:
    assert operand.dtype is not None, "lowering takes resolved trees"
    dtype = torch_dtype(operand.dtype)
    if operand.kind is Kind.AUX:
        return _matrix(cppgen, dtype, swapped)
    if operand.kind is Kind.SCALAR:
        return torch.empty(1, 1, dtype=dtype)
    along_n = (operand.kind is Kind.ROW) != swapped
    return torch.empty((1, _N) if along_n else (_M, 1), dtype=dtype)


def _matrix(cppgen: Any, dtype: torch.dtype, swapped: bool) -> Any:
    # the interface takes every tensor of PyTorch's for contiguous, so the layout is told
    layout = cppgen.LayoutType.ColumnMajor if swapped else cppgen.LayoutType.RowMajor
    return cppgen.Tensor(element=dtype, shape=(_M, _N), layout_tag=layout)


def _set_functors(cppgen: Any, graph: Any, family: str) -> None:
    """Makes each compute node emit our functor: the interface's own tags only know its two enums."""
    for meta in _all_metas(cppgen, graph):
        match = re.fullmatch(r"value_(\d+)", meta.name)
        if match and meta.op == "compute":
            impl = meta.underlying_impl
            visitor = "fusion::Sm90Compute" if family == "sm90" else "threadblock::VisitorCompute"
            impl._type_decl = (
                f"\nusing {impl.name_camel} = cutlass::epilogue::{visitor}<\n"
                f"    Functor{match[1]}, {_element_of(impl.element_output)}, float,\n"
                f"    cutlass::FloatRoundStyle::round_to_nearest\n>;\n"
            )


def _set_direct_access(cppgen: Any, graph: Any, tree: EpilogueTree, access: Access) -> None:
    """Makes the matrices that TMA does not take go between registers and memory, without shared memory."""
    operands = {operand.position: operand for operand in tree.operands}
    for meta in _all_metas(cppgen, graph):
        if (match := re.fullmatch(r"operand_(\d+)", meta.name)) and (way := access.operand(int(match[1]))) != WHOLE:
            impl = meta.underlying_impl
            impl._type_decl = _direct_load(impl.name_camel, str(operands[int(match[1])].dtype), way)
        if (match := re.fullmatch(r"output_(\d+)", meta.name)) and (way := access.output(int(match[1]))) != WHOLE:
            impl = meta.underlying_impl
            impl._type_decl = _direct_store(impl.name_camel, str(tree.outputs[int(match[1])].dtype), way)


# Where both strides are known at run time only, the interface's nodes do, element by element.
_STRIDED_TYPE = "cute::Stride<int64_t, int64_t, cute::Int<0>>"
_ROWS_TYPE = "cute::Stride<int64_t, cute::Int<1>, cute::Int<0>>"


def _direct_load(name: str, dtype: str, way: int) -> str:
    element = ELEMENTS[dtype]
    if way != STRIDED:
        return f"\nusing {name} = ep::UnalignedLoad<{element}, {_ROWS_TYPE}, EpilogueSchedule>;\n"
    return (
        f"\nusing {name} = cutlass::epilogue::fusion::Sm90AuxLoad<\n"
        f"    0 /*Stages*/, void, {element}, {_STRIDED_TYPE}, void, void, 1, false /*EnableNullptr*/\n>;\n"
    )


def _direct_store(name: str, dtype: str, way: int) -> str:
    element = ELEMENTS[dtype]
    if way != STRIDED:
        return f"\nusing {name} = ep::UnalignedStore<{element}, {_ROWS_TYPE}, EpilogueSchedule>;\n"
    return (
        f"\nusing {name} = cutlass::epilogue::fusion::Sm90AuxStore<\n"
        f"    0 /*Stages*/, void, {element}, cutlass::FloatRoundStyle::round_to_nearest,\n"
        f"    {_STRIDED_TYPE}, void, void, 1, false /*EnableNullptr*/\n>;\n"
    )


def _with_batch_strides(types: str) -> str:
    """The types with a batch stride that is known at run time only, of everything but scalars."""
    for rows, columns in (
        ("int64_t", "cute::Int<1>"),
        ("cute::Int<1>", "int64_t"),
        ("int64_t", "int64_t"),
        ("cute::Int<0>", "cute::Int<1>"),
        ("cute::Int<1>", "cute::Int<0>"),
    ):
        types = types.replace(
            f"cute::Stride<{rows}, {columns}, cute::Int<0>>", f"cute::Stride<{rows}, {columns}, int64_t>"
        )
    return types


def _element_of(element: Any) -> str:
    return ELEMENTS[element.name]


def _all_metas(cppgen: Any, graph: Any) -> list[Any]:
    metas = []
    for meta in graph.nodes_meta:
        metas.append(meta)
        if isinstance(meta, cppgen.TopoVisitorNode):
            metas.extend(_all_metas(cppgen, meta.subgraph))
    return metas


def _root_node(graph: Any, family: str) -> str:
    return str(graph.get_all_inputs("D")[0] if family == "sm90" else graph.nodes_topological_order()[-1])


class _Initialisers:
    """Writes the argument initialisers in the order in which the emitter nests the types."""

    def __init__(self, cppgen: Any, tree: EpilogueTree, graph: Any, access: Access, swapped: bool) -> None:
        self.cppgen = cppgen
        self.swapped = swapped
        self.graph = graph
        self.tree = tree
        self.access = access
        self.operands = {operand.position: operand for operand in tree.operands}

    def of(self, name: str) -> str:
        """The initialiser of the visitor that the emitter names after the node."""
        meta = self.graph.get_node_meta(name)
        if isinstance(meta, self.cppgen.TopoVisitorNode):
            # the subgraph's last node only marks where the result goes
            members = meta.subgraph.nodes_topological_order()[:-1]
            parts = [
                self.of(member) if meta.subgraph.get_node_meta(member).disabled else self.own(member)
                for member in members
            ]
            return self._braces(parts)
        children = self.graph.get_all_inputs(name)
        if not children:
            return self.own(name)
        return self._braces([*(self.of(child) for child in children), self.own(name)])

    def own(self, name: str) -> str:
        """The initialiser of the node by itself."""
        if match := re.fullmatch(r"operand_(\d+)", name):
            return self._operand(self.operands[int(match[1])])
        if name == "D" or name.startswith("output_"):
            index = 0 if name == "D" else int(name.removeprefix("output_"))
            return _output_arguments(self.tree, index, self.access, self.swapped)
        return "{}"  # accumulator and compute nodes have no arguments

    def _operand(self, operand: Operand) -> str:
        element = ELEMENTS[str(operand.dtype)]
        source = f"args.operands[{operand.position}]"
        pointer = f"static_cast<{element}*>({source}.data)"
        if operand.kind is Kind.SCALAR:
            return f"{{{{{element}({source}.value)}}, {{{pointer}}}, {{}}}}"
        if operand.kind is Kind.AUX:
            way = self.access.operand(operand.position)
            stride = matrix_stride(source, way, self.access.batched, swapped=self.swapped)
        elif self.access.batched:
            along_m, along_n = ("0", "1") if (operand.kind is Kind.ROW) != self.swapped else ("1", "0")
            stride = f"cute::make_stride(cute::Int<{along_m}>{{}}, cute::Int<{along_n}>{{}}, {source}.batch_stride)"
        else:
            stride = "{}"
        return f"{{{pointer}, {element}(0), {stride}}}"

    @staticmethod
    def _braces(parts: list[str]) -> str:
        return "{" + ", ".join(parts) + "}"


def _output_arguments(tree: EpilogueTree, index: int, access: Access, swapped: bool) -> str:
    element = ELEMENTS[str(tree.outputs[index].dtype)]
    output = f"args.outputs[{index}]"
    stride = matrix_stride(output, access.output(index), access.batched, swapped=swapped)
    return f"{{static_cast<{element}*>({output}.data), {stride}}}"


def matrix_stride(source: str, way: int, batched: bool, *, swapped: bool = False) -> str:
    """The C++ expression of a matrix's stride, rows, columns and batch; ``source`` is its argument.

    Args:
        swapped: whether the stride is that of the matrix's transpose.
    """
    columns = f"{source}.column_stride" if way == STRIDED else "cute::Int<1>{}"
    batch = f"{source}.batch_stride" if batched else "cute::Int<0>{}"
    first, second = f"{source}.leading_dimension", columns
    if swapped:
        first, second = second, first
    return f"cute::make_stride({first}, {second}, {batch})"
