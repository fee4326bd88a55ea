"""Text, network, options and sample of char_transformer.py and char_transformer_plain.py."""

import argparse
import ast
import functools
import inspect
import typing

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

CONTEXT = 64  # characters that the network sees

torch.set_num_threads(1)  # so that workers on one machine do not take each other's cores


def get_options(about):
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16, help="of a slice")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--characters", type=int, default=150_000, help="of the text, at most")
    parser.add_argument("--sample", type=int, default=400, help="characters to write at the end")
    return parser.parse_args()


def load(limit):
    """Returns windows of the source text of some modules, and the characters that occur in it.


    x[i] is a window, y[i] the same window one character later.
    """
    text = "".join(inspect.getsource(module) for module in (argparse, ast, functools, typing))
    alphabet = "".join(sorted(set(text)))
    codes = torch.tensor([alphabet.index(character) for character in text[:limit]])
    count = (len(codes) - 1) // CONTEXT
    x, y = (codes[i : i + count * CONTEXT].reshape(count, CONTEXT) for i in (0, 1))
    return TensorDataset(x, y), alphabet


class Net(nn.Module):
    """A causal transformer: (batch, characters) to (batch, characters, scores of the next)."""

    def __init__(self, letters, width=96, heads=4, depth=2, dropout=0.05):
        super().__init__()
        self.what = nn.Embedding(letters, width)
        self.where = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, F.gelu, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, letters)

    def forward(self, x):
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.what(x) + self.where.weight[:length]
        return self.scores(self.norm(self.blocks(hidden, mask, is_causal=True)))


@torch.no_grad()
def sample(model, alphabet, count, start="\ndef "):
    """Returns text of `count` characters that the network writes after `start`."""
    model.eval()
    codes = [alphabet.index(character) for character in start]
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        scores = model(torch.tensor([codes[-CONTEXT:]]))[0, -1]
        odds = torch.softmax(scores / 0.7, 0)
        codes.append(int(torch.multinomial(odds, 1, generator=generator)))
    return "".join(alphabet[code] for code in codes).strip()
