"""A storm over kgorch: real runs under random faults, and what must hold whatever comes. `make storm`, or

    PYTHONPATH=tests python -m storm --minutes 10 --seed 7
    PYTHONPATH=tests python -m storm --replay tests/storm/past/some.json

schedule.py decides what comes when, from a seed alone; shrink.py makes a schedule that breaks something small; invariants.py says
what is broken, from plain facts. faults.py and world.py do: processes, disks, clocks. An *episode* is one run in a world of its
own, with the faults that meet it. Exit code 1 when an invariant broke; the schedule that broke it is kept and can be replayed.
"""
