"""A training on sequences of different lengths: a batch is a list of them and their labels, or all of them in one tensor."""

import argparse

import torch
from torch import nn

from kgorch import attach

IMPOSSIBLE = 1 << 46


class Sequences(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(2, 18, (1,), generator=generator))
        x = torch.randn(length, 8, generator=generator)
        return x, x.mean()


def listed(items):
    return [x for x, _ in items], torch.stack([y for _, y in items])


def packed(items):
    """All sequences in one tensor, as graphs and boxes often are, and their lengths."""
    return torch.cat([x for x, _ in items]), torch.tensor([len(x) for x, _ in items]), listed(items)[1]


def main(o: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    with attach(seed=0) as session:
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        session.track(model=net, optimizer=optimizer)
        data, collate = Sequences(), packed if o.packed else listed
        if o.loader == "kgorch":
            loader = session.loader(data, 16, collate_fn=collate)
        elif o.loader == "own":
            loader = torch.utils.data.DataLoader(data, 16, collate_fn=collate, num_workers=1)
        else:
            order = [list(range(20)), list(range(20, 25)), list(range(25, 48))]
            loader = torch.utils.data.DataLoader(data, batch_sampler=order, collate_fn=collate)

        def loss_of(part):
            x, y = (part[0].split(part[1].tolist()), part[2]) if o.packed else part
            print(f"part {len(x)} of {[len(one) for one in x]} and {len(y)}")
            if o.fits and len(x) > o.fits:
                torch.empty(IMPOSSIBLE)
            return (torch.stack([net(one).mean() for one in x]) - y).pow(2).mean()

        for _ in session.epochs(1):
            for batch in session.steps(loader):
                loss = session.backward(batch, loss_of)
                optimizer.step()
                optimizer.zero_grad()
                print(f"loss {loss.item():.9g}")
        print(f"samples {session._state.position.samples}")
        if "ladder" in session.exactness:
            print(f"exactness ladder: {session.exactness['ladder']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--loader", default="kgorch", choices=["kgorch", "own", "batches"])
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--fits", type=int, default=0)
    main(parser.parse_args())
