"""Trains a convolutional network on scikit-learn's digits in one process, with torch alone."""

import sys

import digits
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

options = digits.get_options(__doc__)
torch.manual_seed(0)
train, test = digits.load()
model = digits.Net()
opt = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, options.epochs)
for epoch in range(options.epochs):
    for x, y in DataLoader(train, batch_size=options.batch_size, shuffle=True):
        F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    sched.step()
    figures = digits.evaluate(model, test)
    print(f"epoch {epoch + 1}/{options.epochs}: {figures}")
torch.save(model.state_dict(), options.checkpoint)
sys.exit(digits.verdict(figures, options))
