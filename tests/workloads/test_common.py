"""What the reference trainings share: figures summed over ranks, metrics.csv, files that cannot be read."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from torch import nn

from kgorch.worker import attach
from kgorch.worker.data.keyed_loader import Loader
from kgorch.worker.ranks.virtual_ranks import VirtualRanks
from kgorch.workloads.common.files import DataError, picture, readable
from kgorch.workloads.common.precision import finite
from kgorch.workloads.common.record import Record
from kgorch.workloads.common.scoring import summed


@pytest.fixture
def session(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with attach(seed=0) as alone:
        yield alone


def test_figures_are_summed_over_all_samples_and_the_network_trains_on_afterwards(session):
    net = nn.Dropout(0.9)
    loader = session.loader(torch.arange(7.0), 2, shuffle=False, drop_last=False)
    found = summed(session, net, loader, lambda part: torch.stack([net(part).sum(), torch.tensor(float(len(part)))]))
    assert found == [21.0, 7.0], "nothing dropped out, nothing counted twice"
    assert net.training


def test_a_sample_that_another_rank_counts_is_not_computed(session):
    """One process plays two ranks, of which a batch of one sample gives one nothing."""
    ranks, computed = VirtualRanks(1, 0, 1, 1), []
    loader = Loader(torch.arange(7.0), 1, ranks=lambda: ranks, seed=0, shuffle=False, drop_last=False)
    ranks = VirtualRanks(2, 0, 2, 1)

    def figures(part):
        computed.append(part)
        return torch.stack([part.sum(), torch.tensor(float(len(part)))])

    assert summed(session, nn.Identity(), loader, figures) == [21.0, 7.0]
    assert len(computed) == 7


def test_a_rank_that_has_no_sample_of_its_own_adds_nothing(session):
    ranks = VirtualRanks(2, 0, 1, 2)
    loader = Loader(torch.arange(1.0), 2, ranks=lambda: ranks, seed=0, shuffle=False, drop_last=False)
    assert summed(session, nn.Identity(), loader, lambda part: torch.stack([part.sum() + 1, part.sum() + 2])) == [0, 0]


def test_what_overflows_in_half_precision_is_predicted_in_single_precision(session):
    session._state.probe.as_on_cuda = True  # autocast is on, as on CUDA
    net, calls = nn.Linear(2, 1, bias=False), []
    nn.init.constant_(net.weight, 300)

    def forward(value):
        calls.append(value)
        return net(torch.full((1, 2), value))

    with torch.no_grad():
        assert finite(session, lambda: forward(10.0)).dtype == torch.float16
        assert finite(session, lambda: forward(300.0)).item() == 180_000
        assert calls == [10.0, 300.0, 300.0]
        calls.clear()
        finite(session, lambda: forward(300.0).argmax(-1))
        assert calls == [300.0], "a whole number shows nothing"
        finite(session, lambda: forward(300.0).argmax(-1), output_of=net)
        assert calls == [300.0] * 3 and not net._forward_hooks


def test_metrics_csv_has_a_line_an_epoch_though_one_was_done_twice(session):
    record = Record(session)
    record.add(epoch=0, dice=0.5)
    kept = record.state_dict()
    record.add(epoch=1, dice=0.6)
    again = Record(session)
    again.load_state_dict(kept)
    again.add(epoch=1, dice=0.6, skipped=2)
    assert (session.output / "metrics.csv").read_text().splitlines() == ["epoch,dice,skipped", "0,0.5,", "1,0.6,2"]


@pytest.mark.parametrize("cut", [0, 20, 60])
def test_a_picture_that_cannot_be_read_is_named(tmp_path, cut):
    path = tmp_path / "moth.png"
    Image.new("RGB", (32, 32), (10, 200, 30)).save(path)
    assert picture(path).shape == (32, 32, 3) and picture(path, "L").shape == (32, 32)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"moth\.png cannot be read"):
        picture(path)
    with pytest.raises(DataError, match=r"gone\.png cannot be read"):
        picture(tmp_path / "gone.png")


def test_broken_samples_are_left_out_only_where_the_plan_says_so(tmp_path):
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    for path in paths:
        Image.new("L", (8, 8)).save(path)
    paths[1].write_bytes(b"no picture")
    assert readable(paths, picture, skip_broken=False) == (paths, [])
    sound, broken = readable(paths, picture, skip_broken=True)
    assert sound == [paths[0], paths[2]]
    assert len(broken) == 1 and "1.png" in broken[0]
