"""Which machine of a fleet takes a run."""

from __future__ import annotations

import pytest

from kgorch.core.fleet import OWNER_FIRST_S, KnownState, StateSource, is_dead, may_try, source_of

OLD, NEW = (0, 100), (0, 200)


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_run_without_a_checkpoint_begins_anywhere(is_alive):
    assert source_of(KnownState(None, None, None, is_alive)) is StateSource.BEGINNING


@pytest.mark.parametrize("is_alive", [True, False])
def test_the_newest_checkpoint_is_used_where_it_is_reached(is_alive):
    assert source_of(KnownState(NEW, NEW, None, is_alive)) is StateSource.HERE
    assert source_of(KnownState(NEW, NEW, NEW, is_alive)) is StateSource.HERE
    assert source_of(KnownState(NEW, OLD, NEW, is_alive)) is StateSource.MIRROR
    assert source_of(KnownState(NEW, None, NEW, is_alive)) is StateSource.MIRROR


@pytest.mark.parametrize(("here", "mirrored"), [(OLD, None), (None, OLD), (OLD, OLD)])
def test_while_its_owner_lives_no_step_is_trained_again_from_an_older_checkpoint(here, mirrored):
    assert source_of(KnownState(NEW, here, mirrored, True)) is StateSource.OWNER


def test_a_dead_owners_run_goes_on_from_the_newest_checkpoint_that_is_left():
    assert source_of(KnownState(NEW, None, OLD, False)) is StateSource.MIRROR
    assert source_of(KnownState(NEW, OLD, None, False)) is StateSource.HERE
    assert source_of(KnownState(NEW, OLD, OLD, False)) is StateSource.HERE
    assert source_of(KnownState((1, 5), OLD, (0, 150), False)) is StateSource.MIRROR


def test_a_run_whose_files_are_on_a_dead_machine_alone_waits_for_it():
    assert source_of(KnownState(NEW, None, None, False)) is StateSource.OWNER


def test_a_later_stage_is_further_than_any_step_of_an_earlier_one():
    assert source_of(KnownState((1, 5), (0, 900), (1, 5), True)) is StateSource.MIRROR


def test_the_owner_comes_first_while_it_lives_and_not_for_ever():
    assert may_try(is_owner=True, is_owner_alive=True, waits_s=0.0)
    assert not may_try(is_owner=False, is_owner_alive=True, waits_s=OWNER_FIRST_S - 1)
    assert may_try(is_owner=False, is_owner_alive=True, waits_s=OWNER_FIRST_S)
    assert may_try(is_owner=False, is_owner_alive=False, waits_s=0.0)


def test_nobody_is_called_dead_by_who_was_cut_off_from_the_database_itself():
    assert is_dead(is_leased=False, connected_s=300.0, lease_s=300.0)
    assert not is_dead(is_leased=False, connected_s=299.0, lease_s=300.0), "after an outage all leases have expired"
    assert not is_dead(is_leased=True, connected_s=9e9, lease_s=300.0)
