"""One rank that trains under DDP with a DataLoader worker; rank 0 prints loss, weights and the next random number.

`hostile_ranks.py bare` is without otel-dl; `traced` with it; `clear` removes the environment once the group is there.
"""

from __future__ import annotations

import os
import sys


def main(what: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if what == "clear":
        os.environ.clear()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = torch.zeros(())
    for (x,) in DataLoader(TensorDataset(torch.randn(40, 8)), batch_size=4, num_workers=1):
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        print(loss.item().hex(), [weight.hex() for weight in weights.tolist()], torch.rand(1).item().hex(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] != "bare":
        import otel_dl

        otel_dl.instrument()
    main(sys.argv[1])
