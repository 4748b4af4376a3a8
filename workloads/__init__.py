"""Reference trainings that live through many sessions; each also runs alone."""

# a second copy of a module has classes of its own: an `except KgorchError` of one copy does not catch the other's
if __name__ != "kgorch.workloads":
    raise ImportError(f"the folder {__name__!r} is the package 'kgorch.workloads'", name=__name__)
