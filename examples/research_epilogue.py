"""Declares an epilogue of one's own, looks at what fusing it would bring, and runs it behind a GEMM and by itself.

$ python examples/research_epilogue.py
"""

import torch

import epilogues as ep
from epilogues import Aux, Column, Row
from gemm_ops import apply, linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


@ep.epilogue
def gated_softcap(acc, token_scale: Column, bias: Row, gate: Aux):
    """A soft cap at 30 of the scaled product, gated; the gate's SiLU is computed here too."""
    capped = 30.0 * ep.tanh((acc * token_scale + bias) / 30.0)
    return {"D": capped * ep.silu(gate), "capped": capped}


def main() -> None:
    """Compares both ways with PyTorch written out."""
    torch.manual_seed(0)
    m, n, k = 129, 513, 257
    x, weight, gate = (torch.randn(shape, device=DEVICE).to(DTYPE) for shape in ((m, k), (n, k), (m, n)))
    token_scale, bias = torch.rand(m, 1, device=DEVICE).to(DTYPE), torch.randn(n, device=DEVICE).to(DTYPE)
    print(gated_softcap.explain(m, n, k).decision.headline)
    print(gated_softcap.explain(m, n).decision.headline)
    operands = {"token_scale": token_scale, "bias": bias, "gate": gate}
    product = x.double() @ weight.double().T
    capped = 30 * torch.tanh((product * token_scale.double() + bias.double()) / 30)
    expected = {"D": capped * torch.nn.functional.silu(gate.double()), "capped": capped}
    for way, results in (
        ("behind a GEMM", linear(x, weight, gated_softcap, **operands)),
        ("by itself", apply(product.float(), gated_softcap, **operands)),
    ):
        assert isinstance(results, dict)
        for name, exact in expected.items():
            error = (results[name].double() - exact).norm() / exact.norm()
            print(f"{way}: relative error of {name} {error.item():.1e}")
            assert error < 1e-2


if __name__ == "__main__":
    main()
