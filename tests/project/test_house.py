"""The house of CONTRIBUTING: its layers, and how little an optimizer is and keeps."""

import subprocess
import sys

import house
from house import MOST_FIELDS, MOST_PARENTS


def listed(found):
    return "\n".join(["", *map(str, found)])


def test_no_module_imports_from_a_layer_above():
    assert not house.climbing_imports(), listed(house.climbing_imports())


def test_no_modules_import_each_other():
    assert not house.cycles(), listed(house.cycles())


def test_nobody_outside_a_class_touches_its_private_names():
    assert not house.private_reads(), listed(house.private_reads())


def test_no_module_takes_private_names_of_another():
    assert not house.private_imports(), listed(house.private_imports())


def test_no_docstring_only_points_elsewhere():
    assert not house.empty_docstrings(), listed(house.empty_docstrings())


def test_a_public_optimizer_is_at_most_two_classes_from_that_of_torch():
    deep = {name: between for name, between in house.parents().items() if len(between) > MOST_PARENTS}
    assert not deep, listed(deep.items())


def test_an_optimizer_writes_few_fields_after_its_construction():
    many = {name: written for name, written in house.fields().items() if len(written) > MOST_FIELDS}
    assert not many, listed(f"{name} writes {len(written)}: {written}" for name, written in many.items())


def test_the_numbers_of_the_house_can_be_printed():
    command = [sys.executable, house.__file__]
    done = subprocess.run(command, capture_output=True, text=True, cwd=house.ROOT)
    assert done.returncode == 0, done.stderr
    assert "fields written after construction" in done.stdout
