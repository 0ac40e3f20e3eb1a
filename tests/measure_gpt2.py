"""Trains a small GPT-2 twice, as it is and converted by ``gemm_ops.fuse``, and compares the losses step by step.

    $ PYTHONPATH=. python tests/measure_gpt2.py                                   # 200 steps; on a GPU half a minute
    $ PYTHONPATH=. python tests/measure_gpt2.py --json losses.json --plot losses.png

The text is this repository's own sources, byte by byte; both models begin with the same weights and see the same
batches, in bfloat16 autocast with fp32 parameters and AdamW.  A third model, unfused in fp32, says how far apart losses
may be for rounding alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import gemm_ops

BATCH, LENGTH, STEPS = 16, 256, 200
#: Steps over which the learning rate grows; without them losses jump, and apart, where nothing is amiss.
WARM_UP = 20


def make_model(layers: int = 4, width: int = 256) -> nn.Module:
    """A GPT-2 of transformers with random weights."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=width,
        n_layer=layers,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config).train()


def read_text() -> Tensor:
    """The sources of this repository as bytes."""
    root = Path(__file__).resolve().parent.parent
    files = sorted(path for folder in ("epilogues", "gemm_ops") for path in (root / folder).rglob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8).long()


def train(model: nn.Module, batches: list[Tensor], autocast: bool) -> tuple[list[float], float]:
    """The loss of every step, and the milliseconds of a step by the wall clock, the first quarter left out."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARM_UP, total_iters=WARM_UP)
    losses: list[Tensor] = []
    device = batches[0].device.type
    begun = warm = time.perf_counter()
    for step, batch in enumerate(batches):
        if step == len(batches) // 4:
            losses[-1].item()
            warm = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            loss = model(batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        losses.append(loss.detach())
    values = torch.stack(losses).tolist()
    taken = time.perf_counter() - (warm if len(batches) >= 4 else begun)
    return values, 1e3 * taken / (len(batches) - len(batches) // 4)


def compare(steps: int, device: str) -> dict[str, object]:
    """Trains the three; gives the losses by name, and what came of it."""
    torch.manual_seed(0)
    text = read_text()
    places = torch.randint(0, len(text) - LENGTH, (steps, BATCH))
    batches = [torch.stack([text[place : place + LENGTH] for place in row]).to(device) for row in places.tolist()]
    plain = make_model().to(device)
    fused, report = gemm_ops.fuse(plain)
    exact = copy.deepcopy(plain)
    losses, times = {}, {}
    for name, model in (("fused", fused), ("unfused", plain), ("fp32", exact)):
        losses[name], times[name] = train(model, batches, autocast=name != "fp32")

    def apart(one: str, other: str) -> tuple[float, float]:
        differences = [abs(a - b) for a, b in zip(losses[one], losses[other], strict=True)]
        return max(differences), statistics.mean(differences)

    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "fused calls": len(report.fused),
        "losses": losses,
        "ms a step": times,
        "apart": {pair: apart(*pair.split(", ")) for pair in ("fused, unfused", "unfused, fp32", "fused, fp32")},
    }


def show(found: dict[str, object]) -> str:
    """A table of some steps, and how far the curves are apart."""
    losses, times, apart = found["losses"], found["ms a step"], found["apart"]
    assert isinstance(losses, dict) and isinstance(times, dict) and isinstance(apart, dict)
    steps = len(losses["fused"])
    shown = sorted({1, 2, 5, 10, 20, 50, 100, 150, steps} & set(range(1, steps + 1)))
    lines = [
        f"GPT-2, {found['fused calls']} fused calls, {found['device']}",
        "step  " + "  ".join(f"{n:>8}" for n in losses),
    ]
    lines += [f"{step:4}  " + "  ".join(f"{losses[name][step - 1]:8.4f}" for name in losses) for step in shown]
    lines += ["ms    " + "  ".join(f"{times[name]:8.2f}" for name in losses)]
    lines += [f"losses apart, {pair}: at most {most:.4f}, mean {mean:.4f}" for pair, (most, mean) in apart.items()]
    return "\n".join(lines)


def plot(found: dict[str, object], path: str) -> None:
    """Draws the curves over each other."""
    from matplotlib.figure import Figure

    losses = found["losses"]
    assert isinstance(losses, dict)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (name, values), style in zip(losses.items(), ("-", "--", ":"), strict=True):
        axes.plot(range(1, len(values) + 1), values, style, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a byte)")
    axes.legend()
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> int:
    """0 if fused and unfused are no further apart than twice what rounding to bfloat16 explains."""
    parser = argparse.ArgumentParser(description="Trains a small GPT-2 fused and unfused.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help="draw the losses (needs matplotlib)")
    options = parser.parse_args(arguments)
    found = compare(options.steps, "cuda" if torch.cuda.is_available() else "cpu")
    print(show(found))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))
    if options.plot:
        plot(found, options.plot)
    apart = found["apart"]
    assert isinstance(apart, dict)
    pairs = zip(apart["fused, unfused"], apart["unfused, fp32"], strict=True)
    return 0 if all(found <= 2 * rounding + 1e-3 for found, rounding in pairs) else 1


if __name__ == "__main__":
    sys.exit(main())
