"""The benchmark of the suite: every shape with every epilogue against every peer, and the targets.

    $ python -m shape_sweeps benchmark --peers no-compile --json run.json --plot run.svg
    >>> results = run_benchmark(problems(SUITE_DECODE, ["bias_gelu"]), Settings(), device="cuda")
    >>> [(outcome.target.name, outcome.verdict) for outcome in judge(results)]

Contract
--------
* What is measured is ``FusedLinear`` as a user has it, with the backend and kernel that it picks; entries say which.
* Times are the GPU's: medians over interleaved rounds of CUDA graphs (:mod:`shape_sweeps.graph_timing`), the inputs not
  in the L2 cache unless ``--warm`` says so.  Ratios are of times of one series of rounds.
* Every result that is timed is checked, its output full of NaN before; ours has to be as exact as eager PyTorch's.
* A target is data, and is judged by what was measured.  What was not says why.

The rooms, along the way of a run::

    suite         groups of shapes, epilogues, peers
    contenders    the tensors of one problem, and the calls on them
    checks        their results against float64
    runner        plan, build, the host's time, every problem: check, then time
    results       what came of it, as data
    targets       and whether that is good enough
    document      JSON, and back
    tables        the same for the terminal, and as Markdown
    picture       the same as a picture
    command       the command line
"""
