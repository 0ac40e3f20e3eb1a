"""``FusedLinear``: a linear layer with its epilogue.

    >>> layer = FusedLinear(1024, 4096, epilogue="gelu", device="cuda", dtype=torch.bfloat16)
    >>> layer.load_state_dict(nn_linear.state_dict())
    >>> y = layer(x)                                  # gelu(x @ weight.T + bias)

It is an ``nn.Linear`` (constructor, parameters, initialisation, state dict) whose forward pass goes through
:func:`gemm_ops.linear`.

Where gradients are wanted the forward pass is fused too, and stores what the backward reads; the backward is one
elementwise kernel, the two products, and sums (:mod:`gemm_ops.recording`).

Within an adapter (LoRA and its kin) the epilogue follows what the adapter adds (:mod:`gemm_ops.adapters`).

A layer that ``parallelize_module`` has sharded computes as :mod:`gemm_ops.sharded` has it.

On a CUDA device a 16-bit weight whose rows are not multiples of 16 bytes (an odd K) is kept in padded rows while the
layer is in evaluation mode or the weight takes no gradient: the parameter has its shape (N, K), and is a view of rows
of a multiple of 16 bytes, so that no call copies it.  It stays the same parameter: in-place updates, ``.data``,
gradients and state dicts are those of any other, and it is laid out again after ``to``, ``load_state_dict``,
``deepcopy`` and unpickling.  In training mode it is contiguous, because optimisers with ``fused=True`` take nothing
else.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from epilogues import Epilogue, EpilogueError, Kind

from . import adapters, native
from .addressing.views import ACCESS_BYTES, address_of, pitch_of, stands_for_others
from .arguments import EpilogueLike, Outputs, as_epilogue
from .functional import linear
from .symbolic import record_layer


class FusedLinear(nn.Linear):
    """``epilogue(x @ weight.T)``, with the layer's bias as the epilogue's operand ``bias``.

        >>> layer = FusedLinear(1024, 4096, epilogue=ep.builders.residual())
        >>> y = layer(x, residual=x0)                 # the epilogue's other operands are keywords

    Adapters of peft change what the epilogue takes, not what it gives: ``epilogue(x @ (weight + B @ A).T)``, merged or
    not.  So does another wrapper that calls :func:`gemm_ops.epilogue_last`.  What others add to the layer's result
    comes after the epilogue, and code that multiplies by the weight itself leaves it out; neither can be noticed.

    Args:
        in_features: K.
        out_features: N.
        bias: whether the layer has a bias of length N.
        epilogue: an activation's name, an :class:`epilogues.Epilogue`, or None.  An Epilogue of a layer with a
            bias takes it as a row operand called ``bias``.
        device, dtype: of the parameters, as for ``nn.Linear``.
        padded_output: whether the layer gives a view of rows that begin at multiples of 16 bytes, so that a next layer
            reads it as it is, whatever ``out_features`` is.  The default is contiguous, as ``nn.Linear``'s.
        padded_weight: whether the weight is kept in padded rows on a CUDA device: True always, False never, None as
            the module's first page says.

    Raises:
        ValueError: if the layer has a bias that the epilogue has no operand for.
    """

    #: Set where an adapter holds the layer; see :mod:`gemm_ops.holders`.
    within_adapter = False
    #: Whether a layer's weight, bias and epilogue are those that it holds, and not what a subclass makes of them.
    _has_own_parameters = True

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        own = not hasattr(cls, "weight") and not hasattr(cls, "bias")
        cls._has_own_parameters = own and cls.epilogue_of_call is FusedLinear.epilogue_of_call

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        epilogue: EpilogueLike = None,
        padded_output: bool = False,
        padded_weight: bool | None = None,
    ) -> None:
        if isinstance(bias, str) or callable(bias):  # any value is a condition; this one was meant for something else
            raise TypeError(f"bias should be True or False, got {bias!r}; an epilogue is a keyword: epilogue={bias!r}")
        _either_epilogue(epilogue, bool(bias))  # before anything is allocated
        if not isinstance(padded_output, bool):
            raise TypeError(f"padded_output should be True or False, got {padded_output!r}")
        if not isinstance(padded_weight, bool | None):
            raise TypeError(f"padded_weight should be True, False or None, got {padded_weight!r}")
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.epilogue = epilogue
        self.padded_output = padded_output
        self.padded_weight = padded_weight
        self._lay_out_weight()

    @property
    def epilogue(self) -> Epilogue:
        """What is done to each element; may be set to whatever the constructor takes.

        Of an activation's name, or None, it is the epilogue with the addition of a bias while the layer has one.

        Raises:
            TypeError, ValueError, EpilogueError: as the constructor, when it is set.
        """
        with_bias, without = self._epilogues
        return without if self.bias is None or with_bias is None else with_bias

    @epilogue.setter
    def epilogue(self, value: EpilogueLike) -> None:
        self._epilogues: tuple[Epilogue | None, Epilogue] = _either_epilogue(value, self.bias is not None)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "epilogue":  # nn.Module would make a module, which is no epilogue, a submodule
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def epilogue_of_call(self, operands: Container[str]) -> Epilogue:
        """The epilogue of a call with these operands, now that the layer has a bias or has none.

        Raises:
            EpilogueError: the call gives a bias beside the layer's, or there is none.
            ValueError: the layer was given a bias that the epilogue has no operand for.
        """
        with_bias, without = self._epilogues
        if self.bias is None:
            if "bias" in without.operands and "bias" not in operands:
                raise EpilogueError(
                    f"missing operand bias: the layer has no bias, and the epilogue {without.name} takes one; give it "
                    "with the call, or the layer another epilogue"
                )
            return without
        if "bias" in operands:
            raise EpilogueError("operand bias: the layer gives its own, got another with the call")
        if with_bias is None:
            raise ValueError(_refusal_of_bias(without))
        return with_bias

    @classmethod
    def from_linear(
        cls,
        module: nn.Linear,
        *,
        epilogue: EpilogueLike = None,
        padded_output: bool = False,
        padded_weight: bool | None = None,
    ) -> FusedLinear:
        """A layer with the same parameters (shared, not copied), training mode and device.

            >>> model.fc1 = FusedLinear.from_linear(model.fc1, epilogue="gelu")

        Raises:
            TypeError: if ``module`` is not an ``nn.Linear``, or does more than one: a forward of its own, hooks,
                parametrised or not yet known weights.
        """
        _check_plain(module)
        # on the meta device nothing is allocated or drawn from the random generator
        has_bias = module.bias is not None
        fused = cls(
            module.in_features,
            module.out_features,
            has_bias,
            "meta",
            epilogue=epilogue,
            padded_output=padded_output,
            padded_weight=padded_weight,
        )
        fused.weight, fused.bias = module.weight, module.bias
        return fused.train(module.training)

    def forward(self, input: Tensor, **operands: Tensor | float) -> Outputs:  # type: ignore[override]
        """The epilogue over ``input @ weight.T``.

        Args:
            input: (..., in_features).
            operands: the epilogue's operands other than ``bias``.

        Returns:
            (..., out_features), or a dictionary of such tensors if the epilogue has several outputs.
        """
        if self._has_own_parameters and not torch.compiler.is_compiling():
            warm = native.layer(input, self.__dict__, operands)
            if warm is not None:
                return warm
        if isinstance(input, Proxy) and not self.within_adapter:
            return record_layer(self, input, operands, _call_layer)
        if self.within_adapter and adapters.calling_mode(self) == adapters.BARE:
            return self._forward_bare(input, operands)
        epilogue = self.epilogue_of_call(operands)
        if self.bias is not None:
            operands["bias"] = self.bias
        if stands_for_others(self.weight):
            from torch.distributed.tensor import DTensor  # a second's import, which only those need who have it already

            if isinstance(self.weight, DTensor):
                from .sharded import linear_of_shards

                return linear_of_shards(input, self.weight, epilogue, operands, self.padded_output)
        return linear(input, self.weight, epilogue, out=None, padded_output=self.padded_output, **operands)

    def _forward_bare(self, input: Tensor, operands: dict[str, Tensor | float]) -> Outputs:
        """What an ``nn.Linear`` computes, for an adapter; the operands are for what follows."""
        unknown = [name for name in operands if name not in self.epilogue.operands]
        if unknown:
            known = ", ".join(self.epilogue.operands) or "none"
            raise EpilogueError(f"unknown operand {unknown[0]}; the epilogue {self.epilogue.name} has {known}")
        adapters.check_not_sharded(self.weight)
        if self.bias is None:
            return linear(input, self.weight)
        if "bias" in operands:
            raise EpilogueError("operand bias: the layer gives its own, got another with the call")
        return linear(input, self.weight, bias=self.bias)

    def extra_repr(self) -> str:
        padded = ", padded_output=True" if self.padded_output else ""
        padded += "" if self.padded_weight is None else f", padded_weight={self.padded_weight}"
        return f"{super().extra_repr()}, epilogue={self.epilogue.name}{padded}"

    # Wherever PyTorch gives the weight other memory, it gives contiguous rows.

    def train(self, mode: bool = True) -> FusedLinear:
        """As ``nn.Module.train``; also lays the weight out for it."""
        super().train(mode)
        self._lay_out_weight()
        return self

    def _lay_out_weight(self) -> None:
        weight = self._parameters.get("weight")
        if weight is None or self.padded_weight is False or stands_for_others(weight):
            return
        if self.padded_weight or not self.training or not weight.requires_grad:
            pad_parameter(weight)
        elif is_padded(weight.data):
            weight.data = weight.data.contiguous()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> FusedLinear:
        super()._apply(fn, recurse)
        self._lay_out_weight()
        return self

    def _load_from_state_dict(self, *args: Any, **keywords: Any) -> None:
        super()._load_from_state_dict(*args, **keywords)
        self._lay_out_weight()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.pop("within_adapter", None)  # a copy is, where the adapter is copied with it
        self._lay_out_weight()


def _call_layer(
    x: Tensor,
    weight: Tensor,
    epilogue: EpilogueLike,
    bias: Tensor | None,
    padded_output: bool,
    operands: Mapping[str, Tensor | float],
) -> Outputs:
    """What a layer computes, as a function of its parameters: a node of a graph of torch.fx."""
    own = {} if bias is None else {"bias": bias}
    return linear(x, weight, epilogue, out=None, padded_output=padded_output, **own, **operands)


def pad_parameter(parameter: nn.Parameter) -> None:
    """Lays a 16-bit matrix on a CUDA device out in rows that begin at multiples of 16 bytes, if they do not.

    The parameter stays the same object with the same values; its memory is new, with zeros after each row.
    """
    data = parameter.data
    if not _kernels_read(data):
        return
    rows, columns = data.shape
    pitch = pitch_of(columns, data.element_size())
    if pitch != columns and rows > 1 and not is_padded(data):
        padded = torch.zeros((rows, pitch), dtype=data.dtype, device=data.device)[:, :columns]
        parameter.data = padded.copy_(data)


def _kernels_read(matrix: Tensor) -> bool:
    """Whether it is a matrix that the fused kernels read."""
    return matrix.ndim == 2 and matrix.is_cuda and matrix.element_size() == 2 and matrix.numel() > 0


def is_padded(matrix: Tensor) -> bool:
    """Whether a matrix lies in rows that begin at multiples of 16 bytes and are longer than need be."""
    return (
        matrix.ndim == 2
        and not matrix.is_contiguous()
        and matrix.stride() == (pitch_of(matrix.shape[1], matrix.element_size()), 1)
        and address_of(matrix) % ACCESS_BYTES == 0
    )


def _either_epilogue(epilogue: EpilogueLike, has_bias: bool) -> tuple[Epilogue | None, Epilogue]:
    """The epilogue of a layer while it has a bias, None if it cannot have one, and that while it has none.

    Both are made now, as PyTorch's compiler can trace which one is taken, and not how one is made.

    Raises:
        TypeError, EpilogueError: if there is no such epilogue.
        ValueError: if the layer has a bias that it has no operand for.
    """
    with_bias, without = as_epilogue(epilogue, True), as_epilogue(epilogue, False)
    if with_bias.operands.get("bias") in (Kind.ROW, Kind.AUTO):
        return with_bias, without
    if has_bias:
        raise ValueError(_refusal_of_bias(without))
    return None, without


def _refusal_of_bias(epilogue: Epilogue) -> str:
    return (
        f"the layer has a bias, and the epilogue {epilogue.name} has no row operand called 'bias' for it: "
        "add one, or make the layer with bias=False (a layer that is there: set its bias to None)"
    )


def _check_plain(module: nn.Linear) -> None:
    """Refuses what a layer with the same weight and bias would not replace."""
    if not isinstance(module, nn.Linear):
        raise TypeError(f"from_linear takes an nn.Linear, got {type(module).__name__}")
    name = type(module).__name__
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
        raise TypeError(f"this {name} does not know its in_features yet: run the model once first")
    if not isinstance(module, FusedLinear) and type(module).forward not in (nn.Linear.forward, nn.LazyLinear.forward):
        raise TypeError(f"{name} has a forward of its own, which a FusedLinear would not run")
    if any(not isinstance(value, (nn.Parameter, type(None))) for value in (module.weight, module.bias)):
        raise TypeError(
            f"the weight or bias of this {name} is computed (weight_norm, a parametrisation): "
            "remove that first, such as with torch.nn.utils.parametrize.remove_parametrizations"
        )
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        raise TypeError(f"this {name} has hooks, which a FusedLinear would not run: register them on the new layer")


adapters.watch(FusedLinear)
