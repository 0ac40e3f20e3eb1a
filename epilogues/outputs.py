"""What an epilogue with several outputs gives when it is called inside another one: its values, by name.

    >>> @epilogue
    ... def gelu_residual(acc, bias: Row, residual: Aux):
    ...     outputs = gelu_for_training(acc, bias)
    ...     return {"D": outputs["D"] + residual, "preact": outputs["preact"]}

A dict, to index, to unpack and to return.  Where a value is wanted, an error says which one to take: without it
Python would speak of operand types, or compare the dict itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from .errors import EpilogueError
from .source import explain, user_location
from .tree import MAIN_OUTPUT

if TYPE_CHECKING:
    from .symbol import Symbol


class Outputs(dict[str, "Symbol"]):
    """The outputs of an epilogue, by name; ``epilogue`` is its name."""

    __slots__ = ("epilogue",)

    epilogue: str

    def __init__(self, values: Mapping[str, Symbol], epilogue: str) -> None:
        super().__init__(values)
        self.epilogue = epilogue

    def refuse(self) -> NoReturn:
        """Raises what using the outputs as one value deserves.

        Raises:
            EpilogueError: always.
        """
        raise EpilogueError(
            explain(
                f"epilogue {self.epilogue} has {len(self)} outputs, {', '.join(self)}, and was used as one value",
                user_location(),
                instead=f'take the output that is meant: {self.epilogue}(...)["{MAIN_OUTPUT}"]',
            )
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"the outputs of an epilogue have no attribute {name!r}")
        self.refuse()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        found = next(each for each in _flat((*args, *(kwargs or {}).values())) if isinstance(each, cls))
        found.refuse()

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) if isinstance(other, Mapping) else self.refuse()

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # as of every dict


def one_value(value: Any) -> Any:
    """The value, if it isn't several.

    Raises:
        EpilogueError: for the outputs of an epilogue.
    """
    if isinstance(value, Outputs):
        value.refuse()
    return value


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _flat(value)
        else:
            yield value


def _refused(name: str) -> Callable[..., NoReturn]:
    def method(self: Outputs, *args: Any) -> NoReturn:
        self.refuse()

    method.__name__ = name
    return method


# Not | and its kin, which merge dicts.
_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul and rand xor rxor",
    "neg pos abs invert round lt le gt ge float int index",
)
for _line in _OPERATORS:
    for _name in _line.split():
        setattr(Outputs, f"__{_name}__", _refused(f"__{_name}__"))
