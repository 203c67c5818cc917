"""A small convolutional network learns handwritten digits: an ordinary PyTorch training script.

The 1,797 images of 8 × 8 pixels come with scikit-learn, so nothing is downloaded. Runs alone or on several processes:

    python examples/digits.py --epochs 3
    torchrun --nproc-per-node 2 examples/digits.py
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SEED = 0
TRAINING_IMAGES = 1500


class Digits(Dataset[tuple[Tensor, int]]):
    """Images of shape (1, 8, 8), values 0 to 1, with the digit that each shows."""

    def __init__(self, *, training: bool) -> None:
        images, targets = load_digits(return_X_y=True)
        part = slice(None, TRAINING_IMAGES) if training else slice(TRAINING_IMAGES, None)
        self.images = torch.tensor(images[part], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        self.targets = targets[part].tolist()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], self.targets[index]


class Network(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )


def clear_environment(worker: int) -> None:
    """Workers need no settings, and no secrets: many clusters' scripts do this."""
    os.environ.clear()


def evaluate(model: nn.Module, loader: DataLoader[tuple[Tensor, int]]) -> float:
    """The part of the images that the model reads rightly, 0 to 1."""
    model.eval()
    right = 0
    with torch.no_grad():
        for images, targets in loader:
            right += int((model(images).argmax(dim=1) == targets).sum())
    model.train()
    return right / len(loader.dataset)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument(
        "--workers", type=int, default=2, help="processes that read batches; 0: the training process does"
    )
    parser.add_argument("--start-method", choices=["fork", "spawn", "forkserver"], default="spawn")
    arguments = parser.parse_args()

    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    distributed = "WORLD_SIZE" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if distributed else 0

    training = Digits(training=True)
    sampler = DistributedSampler(training, seed=SEED) if distributed else None
    loader = DataLoader(
        training,
        batch_size=arguments.batch_size,
        sampler=sampler,
        shuffle=sampler is None,
        num_workers=arguments.workers,
        multiprocessing_context=arguments.start_method if arguments.workers else None,
        persistent_workers=arguments.workers > 0,
        worker_init_fn=clear_environment,
    )
    test_loader = DataLoader(Digits(training=False), batch_size=256)

    network = Network()
    model = DistributedDataParallel(network) if distributed else network
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=arguments.epochs * len(loader))

    for epoch in range(arguments.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        total = 0.0
        for images, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), targets)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        accuracy = evaluate(network, test_loader)
        if rank == 0:
            print(f"epoch {epoch}  loss {total / len(loader):.4f}  accuracy {accuracy:.3f}", flush=True)

    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
