"""A program whose step is one CUDA graph, recorded in the mode that forbids most. Of tests/gpu/test_programs.py."""

from __future__ import annotations

import torch
from torch import nn

from harness import Checkpointer

STEPS = 30


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Dropout(0.2), nn.Linear(512, 256)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    ckpt = Checkpointer(model=model, optimizer=optimizer, accumulate=1)
    batch = torch.randn(64, 256, device="cuda")
    graph: torch.cuda.CUDAGraph | None = None

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        (model(batch) - batch).square().mean().backward()
        optimizer.step()

    for _ in ckpt.steps(STEPS):
        batch.copy_(torch.randn(64, 256, device="cuda"))
        if graph is None:
            aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                step()
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="global"):
                step()
        else:
            graph.replay()
    print(f"final {float(model[0].weight.detach().double().sum())!r}")


if __name__ == "__main__":
    main()
