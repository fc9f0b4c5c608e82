"""How fast hot neurons on a GPU and cold ones on the CPU would be: kernel times from bytes over bandwidth.

    simulate_hybrid.py [--hand-off 5 20] [--falcon-density 0.05] [--llama-density 0.3] [--rank-share 16]

Nothing is run. A layer takes attention and predictor on the GPU, then the longer of its hot neurons there and, with a
hand-off before and after, its cold ones on the CPU. What doesn't fit the GPU, in the planner's order (attention with
its cache, predictors, head, neurons by frequency), stays on the CPU. Beside it stands what PowerInfer published for
itself and llama.cpp (SOSP '24), and llama.cpp simulated alike: as many whole layers as fit on the GPU, the others on
the CPU.

Assumed, for want of measurements: the densities; that 80 % of activations fall on the share `hot` of the neurons (the
paper's figures for OPT-30B, 26 %, and for a Llama-2-70B with ReLU, 43 %) by a power law; predictors of rank D / 16;
that 80 % of the GPU's bandwidth and 75 % of the CPU's are reached. A second table says from how many tokens of a prompt
on it takes less time to bring cold neurons over PCIe than to run them on the CPU, which is assumed to do 1 (i9) and 0.7
(i7) TFLOP/s, and no less than 0.4 of the work of a dense FFN however few neurons fire (so it is measured here: 0.1 of
them in 1 / 1.44 of the time of all, attention included).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import numpy as np

GPU_REACHED, CPU_REACHED = 0.80, 0.75
PCIE_REACHED = 0.80
#: The least of a dense FFN's work that the CPU has with a prompt.
DENSE_SHARE = 0.4
#: GPU memory that its context and buffers take.
RESERVE = 1.0e9
#: Neurons of a layer are drawn as so many groups of equal frequency.
GROUPS = 4096


@dataclass(frozen=True)
class Machine:
    """Memory in bytes, bandwidths in bytes a second; the decode of a token hardly uses PCIe, prompts do."""

    name: str
    vram: float
    gpu: float
    cpu: float
    pcie: float
    cpu_flops: float


@dataclass(frozen=True)
class Model:
    """A shape, and how sparse it is."""

    name: str
    d: int
    ff: int
    layers: int
    kv: int
    vocab: int
    matrices: int
    density: float
    hot: float


HIGH = Machine("RTX 4090, i9-13900K", 24e9, 1008e9, 67.2e9, 32e9, 1e12)
LOW = Machine("RTX 2080 Ti, i7-12700K", 11e9, 616e9, 38.4e9, 16e9, 0.7e12)
FALCON = Model("Falcon-40B", 8192, 32768, 60, 1024, 65024, 2, 0.05, 0.26)
LLAMA70 = Model("Llama-2-70B", 8192, 28672, 80, 1024, 32000, 3, 0.30, 0.43)
LLAMA13 = Model("Llama-2-13B", 5120, 13824, 40, 5120, 32000, 3, 0.30, 0.43)
FP16, INT4 = ("FP16", 2.0), ("INT4", 18 / 32)
#: Machine, model, type; tokens a second that the paper gives for PowerInfer and llama.cpp.
PUBLISHED = [
    (HIGH, FALCON, FP16, 11.2, 1.0),
    (HIGH, LLAMA70, INT4, 8.1, 2.7),
    (HIGH, LLAMA13, FP16, 24.8, 8.9),
    (LOW, FALCON, INT4, 6.8, 0.85),
    (LOW, LLAMA70, INT4, 5.2, 1.7),
]


def frequencies(m: Model) -> np.ndarray:
    """How often each group of neurons fires, most often first: a power law, at most once a token."""
    exponent = 1 - np.log(0.8) / np.log(m.hot)
    f = ((np.arange(GROUPS) + 0.5) / GROUPS) ** -exponent
    scale = m.density / f.mean()
    # What is cut off at one goes to the others.
    while abs(np.minimum(1, scale * f).mean() - m.density) > 1e-6:
        scale *= m.density / np.minimum(1, scale * f).mean()
    return np.minimum(1, scale * f)


def llama_cpp(machine: Machine, m: Model, size: float, context: int) -> float:
    """Tokens a second of whole layers on either side."""
    layer = size * (2 * m.d * m.d + 2 * m.d * m.kv + m.matrices * m.d * m.ff) + 4 * m.kv * context
    n_gpu = min(m.layers, int((machine.vram - RESERVE) / layer))
    head = size * m.d * m.vocab
    gpu, cpu = machine.gpu * GPU_REACHED, machine.cpu * CPU_REACHED
    return 1 / (n_gpu * layer / gpu + (m.layers - n_gpu) * layer / cpu + head / (gpu if n_gpu == m.layers else cpu))


def hybrid(
    machine: Machine, m: Model, size: float, context: int, hand_off: float, rank: int
) -> tuple[dict[str, float], float]:
    """Seconds of a token by part, and the share of neurons on the GPU."""
    gpu, cpu = machine.gpu * GPU_REACHED, machine.cpu * CPU_REACHED
    attention = size * (2 * m.d * m.d + 2 * m.d * m.kv) + 4 * m.kv * context
    predictor = size * rank * (m.d + m.ff)
    head = size * m.d * m.vocab
    left = machine.vram - RESERVE
    n_attention = min(m.layers, int(left / attention))
    left -= n_attention * attention
    n_predictors = min(n_attention, int(left / predictor))
    left -= n_predictors * predictor
    has_head = left >= head
    left -= head * has_head
    f = frequencies(m)
    ffn = size * m.matrices * m.d * m.ff
    # Layers are alike: each gets the same share.
    n_hot = min(GROUPS, int(GROUPS * max(0.0, left) / (ffn * m.layers)))
    hot, cold = ffn * f[:n_hot].sum() / GROUPS / gpu, ffn * f[n_hot:].sum() / GROUPS / cpu
    wait = max(0.0, cold + 2 * hand_off * (n_hot < GROUPS) - hot)
    seconds = {
        "attention": n_attention * attention / gpu,
        "attention on the CPU": (m.layers - n_attention) * attention / cpu,
        "predictors": n_predictors * predictor / gpu + (m.layers - n_predictors) * predictor / cpu,
        "hot neurons": m.layers * hot,
        "waiting for cold ones": m.layers * wait,
        "head": head / (gpu if has_head else cpu),
    }
    return seconds, n_hot / GROUPS


def feed_from(machine: Machine, m: Model, size: float) -> float:
    """Tokens from which bringing a neuron to the GPU takes less time than running it on the CPU."""
    flops = 2 * max(m.density, DENSE_SHARE)
    return size / (machine.pcie * PCIE_REACHED) / (flops / machine.cpu_flops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hand-off", type=float, nargs="+", default=[5, 20], metavar="MICROSECONDS")
    parser.add_argument("--context", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--falcon-density", type=float, default=FALCON.density)
    parser.add_argument("--llama-density", type=float, default=LLAMA70.density)
    parser.add_argument("--rank-share", type=int, default=16, metavar="N", help="predictors have rank D / N")
    a = parser.parse_args()
    for machine in (HIGH, LOW):
        print(
            f"{machine.name}: {machine.vram / 1e9:.0f} GB at {machine.gpu / 1e9:.0f} GB/s, "
            f"DRAM {machine.cpu / 1e9:.1f} GB/s, PCIe {machine.pcie / 1e9:.0f} GB/s each way"
        )
    header = ["machine", "model", "published: PowerInfer", "llama.cpp", "simulated: llama.cpp"]
    header += [f"hybrid, {h:g} µs" for h in a.hand_off] + [
        "neurons on the GPU",
        f"where the time goes, {a.hand_off[0]:g} µs",
    ]
    print("\n| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for machine, m, (name, size), powerinfer, llama in PUBLISHED:
        m = replace(m, density=a.falcon_density if m is FALCON else a.llama_density)
        runs = [hybrid(machine, m, size, a.context, 1e-6 * h, m.d // a.rank_share) for h in a.hand_off]
        seconds, share = runs[0]
        total = sum(seconds.values())
        parts = ", ".join(f"{part} {100 * s / total:.0f} %" for part, s in seconds.items() if s / total >= 0.005)
        cells = [machine.name.split(",")[0], f"{m.name} {name}", f"{powerinfer}", f"{llama}"]
        cells += [f"{llama_cpp(machine, m, size, a.context):.2f}"]
        cells += [f"{1 / sum(s.values()):.1f}" for s, _ in runs]
        print("| " + " | ".join([*cells, f"{100 * share:.0f} %", parts]) + " |")
    print("\n| machine | model | cold neurons pay on the GPU from |\n|---|---|---|")
    for machine, m, (name, size), *_ in PUBLISHED:
        print(f"| {machine.name.split(',')[0]} | {m.name} {name} | {feed_from(machine, m, size):.0f} tokens |")


if __name__ == "__main__":
    main()
