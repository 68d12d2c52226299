"""Free memory, as a container's or a scheduler's limit leaves it."""

from __future__ import annotations

import pytest

from extract.system import free_memory


def group(folder, limit, used, cache, names=("memory.max", "memory.current", "inactive_file")):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\nslab 1 2\n")


def test_free_memory_is_that_of_the_machine_at_most():
    # Other processes take and give back memory in between.
    assert 1 << 28 < free_memory.free_bytes() <= 1.1 * free_memory._machine_bytes()


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ([("a/b", 1000, 600, 100)], [500]),  # what the file cache gives back is free
        ([("a", 1000, 900, 0), ("a/b", "max", 0, 0)], [100]),  # the limit of a group above
        ([("", 800, 300, 0)], [500]),  # in a container, the root is the group
        ([], []),
    ],
)
def test_limits_of_groups_count(tmp_path, limits, expected):
    for name, *numbers in limits:
        group(tmp_path / name, *numbers)
    free = free_memory._group_bytes(tmp_path, "/a/b", "memory.max", "memory.current", "inactive_file")
    assert free == expected


def test_the_older_groups_say_no_limit_by_a_huge_number(tmp_path):
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    group(tmp_path / "slurm/job", 5000, 1000, 500, names)
    group(tmp_path, 9223372036854771712, 1000, 0, names)
    assert free_memory._group_bytes(tmp_path, "/slurm/job", *names) == [4500]
