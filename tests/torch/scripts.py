"""Five ordinary training scripts, each written once, and the two sides that run them.

`Ours` and `Ddp` hold the few lines that differ between tensorwire and DistributedDataParallel.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

import tensorwire.torch as tw
from tensorwire.torch.loader import seed_of


class Ours:
    def __init__(self, job: tw.Job) -> None:
        self.job = job

    def wrap(
        self, model: nn.Module, optimizer: Any, max_norm: float | None = None
    ) -> tuple[nn.Module, Any]:
        return model, tw.DistributedOptimizer(optimizer, model, max_norm=max_norm)

    def loader(self, data: Dataset[Any], size: int, **options: Any) -> Any:
        return self.job.loader(data, batch_size=size, shuffle=True, **options)

    def accumulate(self, model: nn.Module, optimizer: Any) -> AbstractContextManager[None]:
        return optimizer.accumulate()

    def clip(self, model: nn.Module, max_norm: float) -> None:
        """The servers do it."""


class Ddp:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def wrap(
        self, model: nn.Module, optimizer: Any, max_norm: float | None = None
    ) -> tuple[nn.Module, Any]:
        return DistributedDataParallel(model), optimizer

    def loader(
        self, data: Dataset[Any], size: int, accumulate: int = 1, **options: Any
    ) -> Iterator[Any]:
        """The same batches and random numbers as tensorwire's, two slices, seed 0."""
        generator = torch.Generator().manual_seed(seed_of(0, 0))
        order = torch.randperm(len(data), generator=generator).tolist()
        starts = range(size * self.rank, len(data), 2 * size)
        batches = [order[start : start + size] for start in starts]
        loader = iter(DataLoader(data, batch_sampler=batches, generator=generator, **options))
        for step in range(len(batches)):
            batch = next(loader)
            torch.default_generator.manual_seed(seed_of(0, 0, step, self.rank, 1))
            yield batch

    def accumulate(self, model: nn.Module, optimizer: Any) -> AbstractContextManager[None]:
        return model.no_sync()

    def clip(self, model: nn.Module, max_norm: float) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)


Side = Ours | Ddp


def images(count: int, size: int, classes: int = 10) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 1, size, size, generator=generator)
    return TensorDataset(x, torch.randint(classes, (count,), generator=generator))


def tokens(count: int, length: int, words: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(6)
    return TensorDataset(torch.randint(words, (count, length), generator=generator))


# ---- a convolutional network: BatchNorm, dropout, data workers


def cnn(side: Side) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(16 * 3 * 3, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    model, optimizer = side.wrap(model, optimizer)
    for x, y in side.loader(images(96, 8), 8, num_workers=2):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


# ---- a small ResNet: autocast, channels_last


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.b = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_a, self.norm_b = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm_a(self.a(x)))
        return F.relu(x + self.norm_b(self.b(y)))


def resnet(side: Side) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        Block(16),
        Block(16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    ).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    model, optimizer = side.wrap(model, optimizer)
    for x, y in side.loader(images(96, 8), 8):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x.to(memory_format=torch.channels_last)), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


# ---- a small GPT: clipping, accumulation, dropout, tied weights, a buffer that never changes


class Gpt(nn.Module):
    def __init__(self, words: int, width: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.1, F.gelu, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.words(x) * 0.1 + self.places
        return self.head(self.layers(y, mask=self.mask, is_causal=True))


def gpt(side: Side) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = Gpt(40, 32, 12)
    # A large epsilon: the gradient of an attention's key bias is 0 but for rounding, which Adam
    # would blow up to steps of full size.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)
    model, optimizer = side.wrap(model, optimizer, max_norm=0.25)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    for i, (x,) in enumerate(side.loader(tokens(96, 13, 40), 4, accumulate=2)):

        def loss(x: torch.Tensor = x) -> torch.Tensor:
            y = model(x[:, :-1])
            return F.cross_entropy(y.flatten(0, 1), x[:, 1:].flatten()) / 2

        if i % 2 == 0:
            with side.accumulate(model, optimizer):
                loss().backward()
            continue
        loss().backward()
        side.clip(model, 0.25)
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()
    return model


# ---- an LSTM: the gradients of a recurrent layer, zeroed in place


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 16)
        self.lstm = nn.LSTM(16, 24, 2, batch_first=True, dropout=0.3)
        self.head = nn.Linear(24, 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.words(x))[0])


def lstm(side: Side) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = Lstm()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-4, amsgrad=True)
    model, optimizer = side.wrap(model, optimizer)
    for (x,) in side.loader(tokens(96, 9, 30), 8):
        optimizer.zero_grad(set_to_none=False)
        y = model(x[:, :-1])
        F.cross_entropy(y.flatten(0, 1), x[:, 1:].flatten()).backward()
        optimizer.step()
    return model


# ---- an embedding model: large tables, larger than a cell of the servers


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(3000, 64)
        self.items = nn.EmbeddingBag(2000, 64, mode="mean")
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, user: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return (self.users(user) * self.items(items)).sum(1) + self.bias


def embedding(side: Side) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = Embedder()
    tables = [p for name, p in model.named_parameters() if name != "bias"]
    groups = [{"params": tables, "weight_decay": 0.01}, {"params": [model.bias], "lr": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=0.02, eps=1e-4)
    model, optimizer = side.wrap(model, optimizer)
    generator = torch.Generator().manual_seed(7)
    data = TensorDataset(
        torch.randint(3000, (96,), generator=generator),
        torch.randint(2000, (96, 5), generator=generator),
        torch.randn(96, generator=generator),
    )
    for user, items, y in side.loader(data, 8):
        F.mse_loss(model(user, items), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


SCRIPTS: dict[str, Callable[[Side], nn.Module]] = {
    each.__name__: each for each in (cnn, resnet, gpt, lstm, embedding)
}


# ---- what the workers run


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, copied; the names without DistributedDataParallel's prefix."""
    return {
        name.removeprefix("module."): tensor.clone() for name, tensor in model.state_dict().items()
    }


def digest(model: nn.Module) -> str:
    """sha256 of parameters and buffers."""
    result = hashlib.sha256()
    for name, tensor in values(model).items():
        result.update(name.encode())
        result.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return result.hexdigest()


def train_ours(job: tw.Job, name: str) -> tuple[dict[str, torch.Tensor], str]:
    model = SCRIPTS[name](Ours(job))
    return values(model), digest(model)


def train_ddp(rank: int, name: str) -> dict[str, torch.Tensor]:
    return values(SCRIPTS[name](Ddp(rank)))
