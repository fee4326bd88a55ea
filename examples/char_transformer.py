"""Trains a small transformer to write Python, character by character: alone or with workers.

    tensorwire run --workers 2 examples/char_transformer.py

Its twin without tensorwire is char_transformer_plain.py; eight lines differ.
"""

import characters
import torch
import torch.nn.functional as F

import tensorwire.torch as tw

options = characters.get_options(__doc__)
job = tw.init()
data, alphabet = characters.load(options.characters)
model = characters.Net(len(alphabet))
opt = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, options.epochs)
opt = tw.DistributedOptimizer(opt, model, max_norm=1.0)
for _ in job.epochs(options.epochs):
    losses = []
    for x, y in job.loader(data, batch_size=options.batch_size, shuffle=True):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    sched.step()
    job.log(loss=job.mean(sum(losses) / len(losses)))
if job.rank == 0:
    print(characters.sample(model, alphabet, options.sample))
