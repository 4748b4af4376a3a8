"""A character model whose settings are global names: a Python file and --key=value replace them, and nothing else is accepted."""

import os
import sys
import time
from ast import literal_eval

import torch
from torch import nn

out_dir = "out"
init_from = "scratch"
max_iters = 100
eval_interval = 10
learning_rate = 1e-2
n_embd = 8
compile = True
pause = 0.0

for arg in sys.argv[1:]:
    if "=" not in arg:
        assert not arg.startswith("--")
        exec(open(arg).read())
    else:
        assert arg.startswith("--")
        key, value = arg[2:].split("=")
        if key not in globals():
            raise ValueError(f"Unknown config key: {key}")
        try:
            attempt = literal_eval(value)
        except (SyntaxError, ValueError):
            attempt = value
        assert type(attempt) is type(globals()[key]), f"{key}: {attempt!r}"
        globals()[key] = attempt

os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337)
model = nn.Sequential(nn.Embedding(16, n_embd), nn.Linear(n_embd, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
iter_num = 0
if init_from == "resume":
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"), weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"]
    torch.set_rng_state(checkpoint["rng"])
    print(f"Resuming training from {out_dir} at {iter_num}", flush=True)
while iter_num < max_iters:
    tokens = torch.randint(16, (8, 32))
    loss = nn.functional.cross_entropy(model(tokens).view(-1, 16), tokens.roll(-1, 1).view(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    iter_num += 1
    time.sleep(pause)
    print(f"iter {iter_num}: loss {loss.item():.4f}, compile {compile}", flush=True)
    if iter_num % eval_interval == 0 or iter_num == max_iters:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
        torch.save(state | {"rng": torch.get_rng_state()}, os.path.join(out_dir, "ckpt.pt"))
