"""Times the loss over whole logits and without them on one GPU, and compares their gradients.

    python -m bench.gpu_loss [--tokens 32768] [--words 102400] [--dim 2048] [--chunks 4 8 16]

One line a loss: milliseconds of forward and backward, the memory at its fullest beyond inputs and
gradients, and how far the gradients are from those of float32, relative to their norm. The whole
loss is TorchTitan's, compiled; both multiply in BF16.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy

from cookbook.titan.common.chunked_loss import chunked_cross_entropy

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_REPEATS = 10


def whole_loss(compiled: bool = True) -> Loss:
    """TorchTitan's cross-entropy of the output layer's logits."""

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")

    inner: Callable[..., torch.Tensor] = torch.compile(loss_of) if compiled else loss_of
    return lambda hidden, weight, labels: inner(hidden @ weight.T, labels)


def chunked_loss(num_chunks: int) -> Loss:
    """The cookbook's, as `loss.num_chunks` has it with a compiled loss."""
    return lambda hidden, weight, labels: chunked_cross_entropy(
        hidden, weight, labels, num_chunks, backend="inductor"
    )


def run(loss_of: Loss, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The mean loss over tokens, and both gradients."""
    hidden, weight, labels = batch
    loss = loss_of(hidden, weight, labels) / labels.numel()
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


def measure(loss_of: Loss, batch: tuple[torch.Tensor, ...]) -> tuple[float, float]:
    """The median of milliseconds, and the GiB at the peak beyond what was there and comes out."""
    run(loss_of, batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = run(loss_of, batch)
    made = sum(x.numel() * x.element_size() for x in found)
    peak = torch.cuda.max_memory_allocated() - before - made
    del found
    seconds = []
    for _ in range(_REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run(loss_of, batch)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 1e3 * statistics.median(seconds), peak / 2**30


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=4 * 8192)
    parser.add_argument("--words", type=int, default=102400)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--chunks", type=int, nargs="+", default=[4, 8, 16])
    asked = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda")
    hidden = torch.randn(4, asked.tokens // 4, asked.dim, device=device, dtype=torch.bfloat16)
    weight = torch.randn(asked.words, asked.dim, device=device, dtype=torch.bfloat16) * 0.02
    labels = torch.randint(asked.words, hidden.shape[:-1], device=device)
    labels[:, ::431] = -100
    batch = (hidden.requires_grad_(), weight.requires_grad_(), labels)

    # A part of the tokens, for which float32 has room.
    part = (hidden[:, :1024].detach().requires_grad_(), weight, labels[:, :1024])
    exact_part = (part[0].detach().float().requires_grad_(), weight.detach().float(), part[2])
    exact_part[1].requires_grad_()
    exact = run(whole_loss(compiled=False), exact_part)
    losses = {"whole": whole_loss()} | {f"{n} chunks": chunked_loss(n) for n in asked.chunks}
    print(torch.cuda.get_device_name(), torch.__version__)
    print("| loss | ms | GiB | loss off by | hidden gradient | weight gradient |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, loss_of in losses.items():
        off = [
            float((a.float() - b).norm() / b.norm())
            for a, b in zip(run(loss_of, part), exact, strict=True)
        ]
        milliseconds, gib = measure(loss_of, batch)
        errors = " | ".join(f"{error:.1e}" for error in off)
        print(f"| {name} | {milliseconds:.1f} | {gib:.2f} | {errors} |", flush=True)


if __name__ == "__main__":
    main()
