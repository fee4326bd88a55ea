"""Trains a small transformer to write Python, character by character, with torch alone."""

import characters
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

options = characters.get_options(__doc__)
torch.manual_seed(0)
data, alphabet = characters.load(options.characters)
model = characters.Net(len(alphabet))
opt = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, options.epochs)
for epoch in range(options.epochs):
    losses = []
    for x, y in DataLoader(data, batch_size=options.batch_size, shuffle=True):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    sched.step()
    print(f"epoch {epoch + 1}/{options.epochs}: loss {sum(losses) / len(losses):.4g}")
print(characters.sample(model, alphabet, options.sample))
