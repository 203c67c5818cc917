"""Resident memory after 100,000 steps against after 1,000, with everything of `otel_dl.instrument()` running."""

from __future__ import annotations

import gc
import os
import tempfile

from _measure import machine


def resident_mib() -> float:
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.environ |= {"OTEL_TRACES_EXPORTER": "otel_dl_file", "OTEL_DL_DIR": directory}
        import otel_dl

        otel_dl.instrument()
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        torch.set_num_threads(1)
        print(machine())
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        loader = DataLoader(TensorDataset(torch.randn(1_000, 8)), batch_size=1)
        for thousand in range(1, 101):
            for (batch,) in loader:
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
            if thousand in (1, 10, 100):
                otel_dl.flush(30)
                print(f"after {thousand * 1_000:7,} steps: {resident_mib():.1f} MiB resident")


if __name__ == "__main__":
    main()
