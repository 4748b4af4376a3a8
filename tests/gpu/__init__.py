"""`make gpu`: what only a GPU can show, in one command of at most 50 minutes.

A *step* looks for one kind of failure (steps/__init__.py lists them, ordered by risk). It is made of *probes*, each a function in
a process of its own, so that a dead CUDA context, a memory limit or a hang of one leaves the others alone. A probe writes
*checks*: what was expected, what was found.

    PYTHONPATH=tests python -m gpu                        every step that this machine's GPUs allow
    PYTHONPATH=tests python -m gpu basics memory          two steps
    PYTHONPATH=tests python -m gpu basics.pinned_image    one probe
    PYTHONPATH=tests python -m gpu --list                 what there is
    PYTHONPATH=tests python -m gpu --cpu                  a rehearsal: all the code that a CPU can run

__main__.py is the command line, runner.py runs a step, child.py is the process of a step, step.py what a probe writes,
page.py the results page, delegate.py runs tests of pytest, training.py starts the trainings of programs/.
"""
