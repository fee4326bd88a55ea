"""Data, network, options and final report of digits_cnn.py and digits_cnn_plain.py."""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)  # more threads slow so small a network down


def get_options(about):
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="of a slice")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--min-accuracy", type=float, default=0.97, help="less is a failure")
    parser.add_argument("--checkpoint", default="digits.pt", metavar="FILE")
    parser.add_argument("--report", default="report.json", metavar="FILE")
    return parser.parse_args()


def load():
    """Returns 1437 images of 8 x 8 pixels for training and 360 for the test, always the same."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    x = torch.tensor(images[order] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.tensor(labels[order])
    return TensorDataset(x[360:], y[360:]), TensorDataset(x[:360], y[:360])


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(512, 64),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(64, 10),
        )


@torch.no_grad()
def evaluate(model, data):
    """Returns mean loss and accuracy."""
    x, y = next(iter(DataLoader(data, batch_size=len(data))))
    model.eval()
    scores = model(x)
    model.train()
    loss, accuracy = F.cross_entropy(scores, y), (scores.argmax(1) == y).float().mean()
    return {"loss": loss.item(), "accuracy": accuracy.item()}


def verdict(figures, options):
    """Returns 0, or an error message, for sys.exit."""
    accuracy, wanted = figures["accuracy"], options.min_accuracy
    return 0 if accuracy >= wanted else f"test accuracy {accuracy:.4f} is below {wanted}"


def finish(job, options):
    """Saves and prints the report in worker 0; returns its verdict, and 0 in other workers."""
    if job.rank != 0:
        return 0
    job.save(options.checkpoint)
    report = job.report(options.report)
    Console().print(as_table(report))
    return verdict(report["last"], options)


def as_table(report):
    def time(name, about):
        share = report[name] / report["seconds_per_step"]
        table.add_row(about, f"{1e3 * report[name]:.2f} ms", f"{share:.0%}")

    table = Table(show_header=False)
    for side in ("left", "right", "right"):
        table.add_column(justify=side)
    table.add_row("workers, slices", f"{report['workers']}, {report['slices']}")
    table.add_row("test accuracy", f"{report['last']['accuracy']:.4f}")
    table.add_row("test loss", f"{report['last']['loss']:.4f}")
    table.add_row("steps", str(report["steps"]))
    time("seconds_per_step", "time per step")
    time("computation_s", "  computation")
    time("exposed_communication_s", "  exposed communication")
    time("hidden_communication_s", "hidden behind computation")
    time("server_work_s", "server: work")
    if report["server_notes_s"]:  # where killed processes are replaced
        time("server_notes_s", "  of it copies, in case it is killed")
    time("server_wait_s", "server: waiting for the last slice")
    table.add_row("pushed per step and worker", f"{report['bytes_pushed_per_step'] / 1e3:.1f} kB")
    table.add_row("parameters", f"{report['bytes_of_parameters'] / 1e3:.1f} kB")
    table.add_row("path", ", ".join(report["paths"]))
    return table
