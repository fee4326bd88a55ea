"""A linear regression whose second worker is any program that reads and writes files.

    mkdir job
    tensorwire run --workers 1 --file-workers 1 examples/linear_by_files.py
    tensorwire mount job                            # in another terminal, as root
    cc -o linear examples/linear_by_files.c && ./linear job 1
    sh examples/linear_by_files.sh job 1            # or this one, without a compiler

Each worker has other samples of y = 2 a - 3 b + 1, and the three numbers follow only from both:
worker 0 has samples with a = b, worker 1 samples with a = -b.
"""

import torch

import tensorwire.torch as tw

job = tw.init()
model = torch.nn.Linear(2, 1)
with torch.no_grad():
    model.weight.zero_()
    model.bias.zero_()
opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

a = torch.linspace(-1, 1, 5)
x = torch.stack([a, a], dim=1)
y = 2 * x[:, :1] - 3 * x[:, 1:] + 1

for _ in range(100):
    loss = ((model(x) - y) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()

weight, bias = model.weight.tolist()[0], model.bias.item()
print(f"y = {weight[0]:.3f} a + {weight[1]:.3f} b + {bias:.3f}, loss {loss.item():.6f}")
