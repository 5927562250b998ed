"""Only some files may use ZeRO's stage number, and names are free of words without meaning."""

import ast
import re

from support.source_tree import PROGRAMS, sources, walk

STAGE_NUMBER = "zero_stage"
MAY_KNOW_THE_STAGE = (
    *(f"megazero/{package}/" for package in ("config", "rules", "dialects", "command_line")),
    "megazero/deepspeed/deepspeed_engine.py",
    "megazero/deepspeed/zero.py",
    "megazero/planner/advice/choices.py",
    *("megazero/train/reporting.py", "megazero/train/start/outline.py"),  # they print it
    "megazero/verify/configuration.py",
    "megazero/zero/plan.py",
)
EMPTY_CLASS_NAMES = re.compile(r"(Manager|Handler|Helper|Util|Utils)$")
EMPTY_FILE_NAMES = ("utils.py", "util.py", "helpers.py", "misc.py", "common.py")


def identifiers(text: str) -> set[str]:
    """Return the names of variables, attributes and arguments, also those in f-strings."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, (ast.arg, ast.keyword)) and node.arg:
            found.add(node.arg)
    return found


def test_only_the_plan_knows_stage_numbers() -> None:
    """Other files read the table of placements that the plan derives from the stage number."""
    mentioned = [source for source in sources("megazero", *PROGRAMS) if STAGE_NUMBER in source.text]
    found = [source.name for source in mentioned if STAGE_NUMBER in identifiers(source.text)]
    assert [name for name in found if not name.startswith(MAY_KNOW_THE_STAGE)] == []
    assert "megazero/zero/plan.py" in found


def test_names_say_what_a_thing_is() -> None:
    """The files of `deepspeed` have DeepSpeed's names, by which programs import them."""
    classes = [
        f"{source.name}: {node.name}"
        for source in sources()
        for node in walk(source.tree)
        if isinstance(node, ast.ClassDef) and EMPTY_CLASS_NAMES.search(node.name)
    ]
    own = [source for source in sources() if source.package != "deepspeed"]
    assert classes + [source.name for source in own if source.path.name in EMPTY_FILE_NAMES] == []


def test_classes_of_zero_carry_no_prefix() -> None:
    found = [
        f"{source.name}: {node.name}"
        for source in sources("megazero/zero")
        for node in walk(source.tree)
        if isinstance(node, ast.ClassDef) and node.name.startswith(("Distributed", "Zero")) and node.name != "ZeroPlan"
    ]
    assert found == []


def test_a_public_class_has_a_name_of_its_own() -> None:
    """Two things of one name can't be told apart in a search, a traceback or a talk."""
    places: dict[str, list[str]] = {}
    for source in sources():
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(source.name)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
