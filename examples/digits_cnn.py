"""Trains a convolutional network on scikit-learn's digits: alone, or with any number of workers.

    python examples/digits_cnn.py
    tensorwire run --workers 2 examples/digits_cnn.py

Its twin without tensorwire is digits_cnn_plain.py; eight lines differ.
"""

import sys

import digits
import torch
import torch.nn.functional as F

import tensorwire.torch as tw

options = digits.get_options(__doc__)
job = tw.init()
train, test = digits.load()
model = digits.Net()
opt = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, options.epochs)
opt = tw.DistributedOptimizer(opt, model)
job.track(model=model, optimizer=opt, scheduler=sched)
for _ in job.epochs(options.epochs):
    for x, y in job.loader(train, batch_size=options.batch_size, shuffle=True):
        F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    sched.step()
    job.log(**job.mean(digits.evaluate(model, job.shard(test))))
sys.exit(digits.finish(job, options))
