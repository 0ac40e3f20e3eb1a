"""How launches behave on a GPU: streams, graphs, no synchronisation, devices, warm start, falling back."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings

import pytest
import torch
from gpu_support import Case, check_case, make_inputs, relative_error, truth
from torch._subclasses.fake_tensor import FakeTensorMode

import epilogues as ep
import gemm_ops
from gemm_ops import FallbackWarning, FusedLinear

BIAS_GELU = ep.builders.SUITE["bias_gelu"]()
TRAIN = ep.builders.SUITE["train_gelu"]()
# One small kernel per backend serves all tests here.
CASES = tuple(Case(BIAS_GELU, 200, 264, 136, "bf16", backend) for backend in ("sm90", "sm80"))
each_backend = pytest.mark.parametrize("case", CASES, ids=[case.backend for case in CASES])

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built_cases")]


def run(case: Case, *arguments: torch.Tensor, **operands: object) -> torch.Tensor:
    with gemm_ops.use_backend(case.backend):
        result = gemm_ops.matmul(*arguments, case.epilogue, **operands)  # type: ignore[arg-type]
    assert isinstance(result, torch.Tensor)
    return result


@each_backend
def test_runs_on_the_current_stream(case: Case) -> None:
    """Work queued before on the same stream is seen, and nothing waits for another stream."""
    a, b, operands = make_inputs(case)
    expected = run(case, a, b, **operands)
    late = torch.zeros_like(a)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # tens of milliseconds; a launch on another stream would read the zeros
        late.copy_(a)
        result = run(case, late, b, **operands)
    torch.cuda.synchronize()
    assert torch.equal(result, expected)


@each_backend
def test_does_not_synchronise(case: Case) -> None:
    a, b, operands = make_inputs(case)
    run(case, a, b, **operands)
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(400_000_000)
    run(case, a, b, **operands)
    end.record()
    assert not end.query(), "the call waited for the device"
    torch.cuda.synchronize()


@each_backend
def test_cuda_graph(case: Case) -> None:
    a, b, operands = make_inputs(case)
    run(case, a, b, **operands)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(case, a, b, **operands)
    for seed in (1, 2):
        new_a, new_b, new_operands = make_inputs(case, seed=seed)
        a.copy_(new_a)
        b.copy_(new_b)
        operands["bias"].copy_(new_operands["bias"])
        result.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        expected = truth(case, new_a, new_b, new_operands)["D"]
        assert relative_error(result, expected) < 3e-3


@each_backend
def test_threads_share_kernels(case: Case) -> None:
    import threading

    a, b, operands = make_inputs(case)
    expected = run(case, a, b, **operands)
    wrong: list[int] = []

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                result = run(case, a, b, **operands)
            torch.cuda.current_stream().synchronize()
            if not torch.equal(result, expected):
                wrong.append(index)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@each_backend
def test_runs_on_the_tensors_device(case: Case) -> None:
    """The tensors decide, not the current device; both devices get the same bits."""
    a, b, operands = make_inputs(case, device="cuda:0")
    first = run(case, a, b, **operands)
    for current in (0, 1):
        with torch.cuda.device(current):
            second = run(case, a.to("cuda:1"), b.t().to("cuda:1").t(), bias=operands["bias"].to("cuda:1"))
            assert torch.cuda.current_device() == current
        assert second.device == torch.device("cuda:1")
        torch.cuda.synchronize(1)
        assert torch.equal(first.cpu(), second.cpu())


PADDED = tuple(Case(BIAS_GELU, 200, 264, k, "bf16", "sm90") for k in (135, 129, 71, 1))


@pytest.mark.parametrize("case", PADDED, ids=[str(case.k) for case in PADDED])
def test_odd_k_in_padded_rows(case: Case) -> None:
    """K of any extent where rows lie aligned; what is in the padding does not matter."""
    a, b, operands = make_inputs(case)
    padded_a = torch.full((case.m, 144), float("nan"), dtype=a.dtype, device="cuda")
    padded_b = torch.full((case.n, 144), float("nan"), dtype=a.dtype, device="cuda")
    padded_a[:, : case.k], padded_b[:, : case.k] = a, b.t()
    a, b = padded_a[:, : case.k], padded_b[:, : case.k].t()
    result = run(case, a, b, **operands)
    assert relative_error(result, truth(case, a, b, operands)["D"]) < 3e-3


def test_leading_dimensions() -> None:
    case = CASES[0]
    a, b, operands = make_inputs(case)
    expected = run(case, a, b, **operands)
    with gemm_ops.use_backend("sm90"):
        result = gemm_ops.linear(a.view(2, 5, 20, case.k), b.t(), BIAS_GELU, **operands)
        single = gemm_ops.linear(a[3], b.t(), BIAS_GELU, **operands)
    assert isinstance(result, torch.Tensor) and isinstance(single, torch.Tensor)
    assert result.shape == (2, 5, 20, case.n) and torch.equal(result.view_as(expected), expected)
    assert single.shape == (case.n,) and torch.equal(single, expected[3])


def test_fused_linear() -> None:
    plain = torch.nn.Linear(136, 264, device="cuda", dtype=torch.bfloat16)
    fused = FusedLinear(136, 264, device="cuda", dtype=torch.bfloat16, epilogue=BIAS_GELU)
    fused.load_state_dict(plain.state_dict())
    x = torch.randn(200, 136, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), gemm_ops.use_backend("sm90"):
        result = fused(x)
        expected = torch.nn.functional.gelu(plain(x).double(), approximate="tanh")
    assert relative_error(result, expected) < 5e-3
    fused(x.requires_grad_()).sum().backward()
    assert x.grad is not None and fused.weight.grad is not None and fused.bias.grad is not None


MISALIGNED = (
    ("odd K", lambda a, b: (a[:, :-1].contiguous(), b[:-1].t().contiguous().t()), "a: copied into padded rows first"),
    ("odd N", lambda a, b: (a, b[:, :-1].t().contiguous().t()), "output D: between memory and registers"),
    (
        "odd pointer",
        lambda a, b: (torch.cat([a.flatten()[:1], a.flatten()])[1:].view_as(a), b),
        "as it starts 2 bytes after a multiple of 16 bytes",
    ),
)


@pytest.mark.parametrize(("change", "route"), [row[1:] for row in MISALIGNED], ids=[row[0] for row in MISALIGNED])
def test_misaligned_problems_are_fused_and_say_how(change: object, route: str) -> None:
    case = CASES[0]
    a, b, operands = make_inputs(case)
    a, b = change(a, b)  # type: ignore[operator]
    bias = operands["bias"][: b.shape[1]]
    decision = gemm_ops.backend_for(a, b, BIAS_GELU, bias=bias)
    assert decision.backend == "sm90" and any(route in line for line in decision.routes), decision.routes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = [gemm_ops.matmul(a, b, BIAS_GELU, bias=bias) for _ in range(2)]  # the second by its plan
    for result in results:
        assert isinstance(result, torch.Tensor)
        assert relative_error(result, truth(case, a, b, {"bias": bias})["D"]) < 3e-3


@pytest.mark.parametrize("shape", [(0, 264, 136), (200, 0, 136), (200, 264, 0)])
def test_empty(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    bias = torch.randn(n, device="cuda").bfloat16()
    a, b = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(k, n, device="cuda").bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = gemm_ops.matmul(a, b, BIAS_GELU, bias=bias)
    assert isinstance(result, torch.Tensor)
    expected = torch.nn.functional.gelu(bias.float(), approximate="tanh").bfloat16().expand(m, n)
    assert torch.equal(result, expected)


def test_many_calls_leak_nothing() -> None:
    case = CASES[0]
    a, b, operands = make_inputs(case)
    run(case, a, b, **operands)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(200):
        run(case, a, b, **operands)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


_SECOND_PROCESS = """
import json, sys, time
import torch, gemm_ops
x = torch.randn(200, 136, device="cuda", dtype=torch.bfloat16)
w = torch.randn(264, 136, device="cuda", dtype=torch.bfloat16)
bias = torch.randn(264, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
start = time.perf_counter()
with gemm_ops.use_backend("sm90"):
    gemm_ops.linear(x, w, "gelu_tanh", bias=bias)
torch.cuda.synchronize()
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "cppgen": "cutlass_cppgen" in sys.modules}))
"""


@pytest.mark.parametrize("case", CASES[:1], ids=["sm90"])
def test_second_process_loads_without_the_interface(case: Case) -> None:
    check_case(case)  # builds, if nobody has
    done = subprocess.run([sys.executable, "-c", _SECOND_PROCESS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    print(f"warm start: first call after {report['seconds'] * 1e3:.0f} ms")
    assert not report["cppgen"]
    assert report["seconds"] < 5


def test_out_overlapping_an_input_is_refused() -> None:
    a = torch.randn(136, 136, device="cuda").bfloat16()
    with pytest.raises(gemm_ops.ProblemError, match="shares memory"):
        gemm_ops.matmul(a, a.t(), out=a)


def test_torch_compile_gives_the_same() -> None:
    """The call is no part of a graph yet: compiled code breaks there, and computes the same."""
    layer = FusedLinear(136, 264, device="cuda", dtype=torch.bfloat16, epilogue=BIAS_GELU)
    model = torch.nn.Sequential(layer, torch.nn.ReLU())
    x = torch.randn(200, 136, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(x)
        compiled = torch.compile(model, backend="eager")
        assert torch.equal(compiled(x), expected)
        assert torch.equal(compiled(x), expected)


def test_an_odd_n_is_stored_without_what_lies_behind_its_rows() -> None:
    """A TMA store writes whole 16 bytes; rows of an odd N are written another way."""
    x = torch.randn(64, 136, device="cuda").bfloat16()
    weight = torch.randn(257, 136, device="cuda").bfloat16()
    buffer = torch.full((64, 264), 7.0, device="cuda").bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        gemm_ops.linear(x, weight, "relu", out=buffer[:, :257])
    assert (buffer[:, 257:] == 7.0).all()
    assert relative_error(buffer[:, :257], torch.relu(x.double() @ weight.double().t())) < 1e-2


def test_autocast() -> None:
    layer = FusedLinear(136, 264, device="cuda", epilogue=BIAS_GELU)
    x = torch.randn(200, 136, device="cuda")
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16), gemm_ops.use_backend("sm90"):
        result = layer(x)
    assert result.dtype == torch.bfloat16
    expected = torch.nn.functional.gelu(torch.nn.functional.linear(x, layer.weight, layer.bias), approximate="tanh")
    assert relative_error(result, expected.double()) < 1e-2


def test_inside_vmap_pytorch_computes() -> None:
    """A tensor inside vmap has no memory that a kernel could read; nor has a fake one."""
    x, weight = torch.randn(3, 16, 64, device="cuda").bfloat16(), torch.randn(40, 64, device="cuda").bfloat16()
    with pytest.warns(gemm_ops.FallbackWarning, match="transform of torch.func"):
        rows = torch.vmap(lambda matrix: gemm_ops.linear(matrix, weight, "relu"))(x)
    torch.testing.assert_close(rows.float(), torch.relu(x.float() @ weight.float().t()), rtol=2e-2, atol=2e-2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.empty(16, 64, device="cuda", dtype=torch.bfloat16)
        assert gemm_ops.linear(fake, weight, "relu").shape == (16, 40)
