"""``FusedLinear``: a linear layer with its epilogue.

    >>> layer = FusedLinear(1024, 4096, epilogue="gelu", device="cuda", dtype=torch.bfloat16)
    >>> layer.load_state_dict(nn_linear.state_dict())
    >>> y = layer(x)                                  # gelu(x @ weight.T + bias)

It is an ``nn.Linear`` (constructor, parameters, initialisation, state dict) whose forward pass goes through
:func:`gemm_ops.linear`.  Where gradients are wanted the forward pass is computed unfused for now, with autograd
as PyTorch has it; inference, or training under ``torch.no_grad``, is fused.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from epilogues import Epilogue, EpilogueError, Kind

from .functional import EpilogueLike, Outputs, as_epilogue, linear


class FusedLinear(nn.Linear):
    """``epilogue(x @ weight.T)``, with the layer's bias as the epilogue's operand ``bias``.

        >>> layer = FusedLinear(1024, 4096, epilogue=ep.builders.residual())
        >>> y = layer(x, residual=x0)                 # the epilogue's other operands are keywords

    Args:
        in_features: K.
        out_features: N.
        bias: whether the layer has a bias of length N.
        epilogue: an activation's name, an :class:`epilogues.Epilogue`, or None.  An Epilogue of a layer with a
            bias takes it as a row operand called ``bias``.
        device, dtype: of the parameters, as for ``nn.Linear``.

    Raises:
        ValueError: if the layer has a bias that the epilogue has no operand for.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        epilogue: EpilogueLike = None,
    ) -> None:
        chosen = as_epilogue(epilogue, bias)
        _check_bias(chosen, bias)
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.epilogue = chosen

    @classmethod
    def from_linear(cls, module: nn.Linear, *, epilogue: EpilogueLike = None) -> FusedLinear:
        """A layer with the same parameters (shared, not copied), training mode and device.

            >>> model.fc1 = FusedLinear.from_linear(model.fc1, epilogue="gelu")

        Raises:
            TypeError: if ``module`` is not an ``nn.Linear``, or does more than one: a forward of its own, hooks,
                parametrised or not yet known weights.
        """
        _check_plain(module)
        # on the meta device nothing is allocated or drawn from the random generator
        has_bias = module.bias is not None
        fused = cls(module.in_features, module.out_features, has_bias, "meta", epilogue=epilogue)
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
        if self.bias is not None:
            if "bias" in operands:
                raise EpilogueError("operand bias: the layer gives its own, got another with the call")
            operands["bias"] = self.bias
        return linear(input, self.weight, self.epilogue, out=None, **operands)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, epilogue={self.epilogue.name}"


def _check_bias(epilogue: Epilogue, bias: bool) -> None:
    if bias and epilogue.operands.get("bias") not in (Kind.ROW, Kind.AUTO):
        raise ValueError(
            f"the layer has a bias, and the epilogue {epilogue.name} has no row operand called 'bias' for it: "
            "add one, or make the layer with bias=False"
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
