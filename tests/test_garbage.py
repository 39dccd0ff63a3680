"""What is looked through for garbage, and what is not, in a process that is the command's and in one that is not."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import gc, weakref
from megatron_ext import garbage

class Node: pass

def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)

gc.disable()
garbage.process_is_ours({is_ours})
there, before = [Node() for _ in range(1000)], cycle()
garbage.keep_what_is_there()
print(gc.get_freeze_count() >= 1000, before() is None)
later = cycle()
gc.collect()
print(later() is None, sum(type(found) is Node for found in gc.get_objects()))
"""


@pytest.mark.parametrize(("is_ours", "found"), [(True, ["True True", "True 0"]), (False, ["False False", "True 1000"])])
def test_what_is_there_is_kept_in_a_process_of_ours(is_ours: bool, found: list[str]) -> None:
    script = SCRIPT.format(is_ours=is_ours)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == found
