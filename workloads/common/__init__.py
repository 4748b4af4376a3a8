"""Small tools that the reference trainings share; never a framework: each train.py stays whole."""
