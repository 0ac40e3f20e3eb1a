"""What code writes into: the containers that a module holds, and the tensors that a module is given.

    >>> may_write(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)))
    True

Both are read from the source, as far as it says so; what has no source is taken to write.
"""

from __future__ import annotations

import ast
import collections
import functools
import inspect
import operator
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .functions import NotTraceableError, codes_of, functions_of, method_of, source_tree
from .products import has_hooks, is_called_plainly

#: Methods that change a list, a dictionary or a set.
_CHANGING = frozenset(
    {"append", "extend", "insert", "pop", "clear", "remove", "setdefault", "update", "appendleft", "popleft", "discard"}
    | {"add", "popitem", "extendleft", "rotate", "reverse", "sort", "__setitem__", "__delitem__", "__iadd__"}
)
#: How large a dictionary that code reads is looked through for functions.
_MOST_FUNCTIONS = 100

#: Of these a tensor or a package has methods and functions of the same names, which change nothing.
_ALSO_OF_TENSORS = frozenset({"add", "sort"})

#: Functions and methods that write into their first argument without saying so by a trailing underscore.
OUT_OF_PLACE = {
    getattr(operator, "i" + name): getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "matmul")
} | {operator.iand: operator.and_, operator.ior: operator.or_, operator.ixor: operator.xor}
_WRITING = frozenset({*OUT_OF_PLACE, operator.setitem, operator.delitem})
_WRITING_NAMES = frozenset(function.__name__ for function in _WRITING)

#: Where PyTorch's functions take ``inplace`` by position.
_INPLACE_AT = {
    name: list(inspect.signature(function).parameters).index("inplace")
    for name, function in vars(F).items()
    if isinstance(function, FunctionType) and "inplace" in inspect.signature(function).parameters
}


def is_in_place(name: str) -> bool:
    """Whether a function or method of that name writes in place, by PyTorch's convention."""
    return name.endswith("_") and not name.endswith("__")


def writes(target: Any, kwargs: dict[str, Any], args: tuple[Any, ...] = ()) -> bool:
    """Whether a call of a function or method changes one of its arguments, by PyTorch's conventions."""
    name = target if isinstance(target, str) else str(getattr(target, "__name__", ""))
    by_keyword = kwargs.get("inplace", False) is not False or kwargs.get("out") is not None
    return (
        is_in_place(name)
        or target in _WRITING
        or by_keyword
        or _is_inplace_by_position(target, args)
        or _is_mutable(target)
    )


def out_of_place(target: Any, kwargs: dict[str, Any], args: tuple[Any, ...]) -> tuple[Any, dict[str, Any]] | None:
    """The function or method, and its keywords, that gives what one in place would write; None if there is none."""
    rest = {name: value for name, value in kwargs.items() if name != "inplace"}
    if "out" in rest or _is_inplace_by_position(target, args):
        return None
    if target in OUT_OF_PLACE:
        return OUT_OF_PLACE[target], rest
    if isinstance(target, str):
        plain = target.removesuffix("_")
        return (plain, rest) if is_in_place(target) and hasattr(Tensor, plain) else None
    if is_in_place(name := str(getattr(target, "__name__", ""))):
        found = getattr(torch, name.removesuffix("_"), None)
        return None if found is None else (found, rest)
    return (target, rest) if kwargs.get("inplace") is True else None


def _is_inplace_by_position(target: Any, args: tuple[Any, ...]) -> bool:
    name = "" if isinstance(target, str) else str(getattr(target, "__name__", ""))
    position = _INPLACE_AT.get(name, len(args))
    return position < len(args) and args[position] is not False


def _is_mutable(target: Any) -> bool:
    """Whether an operator of torch.ops says that it changes an argument."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(_is_mutable(getattr(target, name)) for name in target.overloads())
    if not isinstance(target, torch._ops.OpOverload):
        return False
    changed = [each for each in target._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    return any(not each.is_out for each in changed)  # which it is told by a keyword


def may_write(module: nn.Module) -> bool:
    """Whether a call of a module may write into what it is given.

    Of PyTorch's own modules those with ``inplace`` do; the code of others is read.
    """
    return any(_part_may_write(part) for part in module.modules())


def _part_may_write(part: nn.Module) -> bool:
    if getattr(part, "inplace", False) is not False or has_hooks(part):
        return True
    replaced = part.__dict__.get("forward")
    if replaced is not None and not hasattr(replaced, "original"):
        return True
    if not is_called_plainly(part):
        return True
    if type(part).__module__.partition(".")[0] == "torch" and not isinstance(part, torch.jit.ScriptModule):
        return isinstance(part, torch.fx.GraphModule)
    try:
        first = method_of(part, "forward")
    except NotTraceableError:
        return True
    if any(_is_in_place(value) for name, value in part.__dict__.items() if name not in ("forward", "_modules")):
        return True
    for function, _ in functions_of(part, first):
        names = {name for code in codes_of(function.__code__) for name in code.co_names}
        if _code_writes(function) or any(_is_in_place(function.__globals__.get(name)) for name in names):
            return True
    return False


def _is_in_place(value: Any) -> bool:
    """Whether a value that code may call is, or has, a function that writes in place."""
    if isinstance(value, list | tuple):
        return any(map(_is_in_place, value))
    if isinstance(value, dict):
        return len(value) < _MOST_FUNCTIONS and any(map(_is_in_place, value.values()))
    if isinstance(value, functools.partial):
        return _is_in_place(value.func) or writes(value.func, value.keywords, value.args)
    if isinstance(value, FunctionType):
        return is_in_place(value.__name__) or _code_writes(value)
    return isinstance(value, BuiltinFunctionType) and (is_in_place(value.__name__) or value in _WRITING)


@functools.lru_cache(maxsize=4096)
def _code_writes(function: FunctionType) -> bool:
    """Whether a function's source has something in place, on whatever; PyTorch's own, given no ``inplace``, has not."""
    if function.__module__.partition(".")[0] == "torch":
        return False
    tree = source_tree(function)
    return tree is None or any(_node_writes(node) for node in ast.walk(tree))


def _node_writes(node: ast.AST) -> bool:
    if isinstance(node, ast.AugAssign):
        return True
    if isinstance(node, ast.Assign | ast.Delete | ast.AnnAssign):
        targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
        parts = [part for target in targets for part in ast.walk(target)]
        return any(
            isinstance(part, ast.Subscript | ast.Attribute) and not isinstance(part.ctx, ast.Load) for part in parts
        )
    if not isinstance(node, ast.Call):
        return False
    name = _called_name(node.func)
    if is_in_place(name) or name in _WRITING_NAMES:
        return True
    for keyword in node.keywords:
        is_off = isinstance(keyword.value, ast.Constant) and keyword.value.value in (False, None)
        if keyword.arg in ("inplace", "out") and not is_off:
            return True
    position = _INPLACE_AT.get(name, len(node.args))
    if position < len(node.args):
        given = node.args[position]
        return not (isinstance(given, ast.Constant) and given.value is False)
    if name == "getattr" and len(node.args) > 1:  # of a method by its name
        wanted = node.args[1]
        return not isinstance(wanted, ast.Constant) or is_in_place(str(wanted.value))
    return False


def _called_name(called: ast.expr) -> str:
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


@functools.lru_cache(maxsize=4096)
def changed_container(function: FunctionType, selves: frozenset[str]) -> str | None:
    """The list or dictionary that a function writes into and that is there after it; None for none.

    That is one of its module (``self.seen.append(x)``), by another name too, or of what is outside the function, as the
    default of an argument is (``def forward(self, x, seen=[])``).
    """
    tree = source_tree(function)
    if tree is None:
        return None  # what a trace changes is looked at after it too
    arguments = [node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)]
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    local = (stored | set(arguments)) - set(function.__code__.co_freevars) - _kept_arguments(function)
    held = set(selves)
    size = -1
    while size != len(held):
        size = len(held)
        for names, value in _bindings(tree):
            if _is_of(value, held):
                held |= names

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.Delete | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]
            parts = [part for target in targets for part in ast.walk(target)]
            written = [
                part.value for part in parts if isinstance(part, ast.Subscript) and not isinstance(part.ctx, ast.Load)
            ]
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id in held:
                written.append(node.target)  # seen = self.seen; seen += [x]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
            written = [node.func.value]
        else:
            continue
        for place in written:
            root = _root(place)
            if not isinstance(root, ast.Name):
                continue
            of_self = root.id in held and (root is not place or root.id not in selves)
            outside = root.id not in local and root.id not in held
            if isinstance(node, ast.Call) and node.func.attr in _ALSO_OF_TENSORS:  # type: ignore[attr-defined]
                of_self, outside = False, False
            if of_self or outside:
                return ast.unparse(place)
    return None


def _kept_arguments(function: FunctionType) -> set[str]:
    """The arguments whose default a call may change for the next one."""
    named = inspect.signature(function, follow_wrapped=False).parameters.values()
    return {each.name for each in named if isinstance(each.default, list | dict | set | collections.deque)}


def _bindings(tree: ast.AST) -> list[tuple[set[str], ast.expr]]:
    """The names that are bound, and to what."""
    found: list[tuple[list[ast.expr], ast.expr | None]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            found.append((node.targets, node.value))
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            found.append(([node.target], node.value))
        elif isinstance(node, ast.For | ast.comprehension):
            found.append(([node.target], node.iter))
    return [
        ({part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}, value)
        for targets, value in found
        if value is not None
    ]


def _root(value: ast.expr) -> ast.expr:
    """What attributes and items are taken of; of ``getattr(self, name)`` and ``self.held.values()`` too."""
    while True:
        if isinstance(value, ast.Attribute | ast.Subscript):
            value = value.value
        elif isinstance(value, ast.Call) and _called_name(value.func) in ("getattr", "vars", "iter") and value.args:
            value = value.args[0]
        elif (
            isinstance(value, ast.Call)
            and isinstance(value.func, ast.Attribute)
            and value.func.attr in ("get", "values", "items", "setdefault")
        ):
            value = value.func.value
        else:
            return value


def _is_of(value: ast.expr, held: set[str]) -> bool:
    """Whether a value may be a container of the module: what is computed is none."""
    if isinstance(value, ast.IfExp):
        return _is_of(value.body, held) or _is_of(value.orelse, held)
    if isinstance(value, ast.BoolOp):
        return any(_is_of(each, held) for each in value.values)
    root = _root(value)
    return isinstance(root, ast.Name) and root.id in held
