"""The code of an error: from the raise site, the class, or the module, in this order."""

from __future__ import annotations

import importlib.util
import pickle

import pytest

from kgorch.core.error_codes import BY_MODULE, PATTERN, code_of_module
from kgorch.errors import CheckpointBroken, KgorchError, NotFound, parse_message


class WithConstructor(KgorchError):
    def __init__(self, run: str) -> None:
        super().__init__(f"{run} went wrong")


def in_module(name: str, expression: str) -> KgorchError:
    """The error that a module of this name constructs."""
    names = {"__name__": name, "KgorchError": KgorchError, "NotFound": NotFound, "WithConstructor": WithConstructor}
    error = eval(expression, names)
    assert isinstance(error, KgorchError)
    return error


@pytest.mark.parametrize(
    ("module", "expression", "code"),
    [
        ("kgorch.plan.entries", "KgorchError('x')", BY_MODULE["kgorch.plan.entries"]),
        ("kgorch.plan.sections", "KgorchError('x')", BY_MODULE["kgorch.plan"]),
        ("kgorch.plan.sections", "NotFound('x')", NotFound.error_code),
        ("kgorch.plan.sections", "NotFound('x', error_code='KG501')", "KG501"),
        ("kgorch.plan.sections", "WithConstructor('ink')", BY_MODULE["kgorch.plan"]),
        ("planner", "KgorchError('x')", ""),
    ],
)
def test_the_raise_site_counts_then_the_class_then_the_nearest_module(module, expression, code):
    assert in_module(module, expression).error_code == code


def test_a_module_that_runs_as_main_is_known_by_its_own_name():
    main = {
        "__name__": "__main__",
        "__spec__": importlib.util.find_spec("kgorch.plan.entries"),
        "KgorchError": KgorchError,
    }
    assert eval("KgorchError('x')", main).error_code == BY_MODULE["kgorch.plan.entries"]


def test_the_code_survives_pickling():
    error = in_module("kgorch.plan.entries", "KgorchError('x', 'fact', next_step='y')")
    copy = pickle.loads(pickle.dumps(error))
    assert copy.render() == error.render() and copy.error_code == error.error_code == "KG103"


def test_the_message_has_the_code_at_the_end_of_its_first_line_and_can_be_read_back():
    error = CheckpointBroken("step 4 is broken\nand step 5", "expected 4 bytes", next_step="kgorch resume")
    assert error.render() == (
        "error: step 4 is broken [KG201]\nand step 5\n  expected 4 bytes\nnext: kgorch resume"
    ) and "KG201" not in str(error)
    error = CheckpointBroken("step 4 [of 5] is broken", "a", "  b", next_step="kgorch resume")
    back = parse_message(f"copied 3 files\n{error.render()}\n")
    assert back and back.render() == error.render() and back.facts == error.facts
    assert parse_message("copied 3 files\n") is None
    plain = parse_message("error: of an older version\nnext: x")
    assert plain and plain.render() == "error: of an older version\nnext: x"


def test_each_module_of_the_table_exists_and_has_a_code():
    for module, code in BY_MODULE.items():
        assert importlib.util.find_spec(module), module
        assert PATTERN.fullmatch(code), code
    assert code_of_module("kgorchestra.plan") == code_of_module("") == ""
