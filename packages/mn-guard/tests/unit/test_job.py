"""What is known about the job from its environment and its processes."""

import os

import pytest

from mn_guard import job


@pytest.mark.parametrize(
    ("parent", "leads"), [("prterun", True), ("prted", True), ("slurmstepd", False), ("sh", False)]
)
def test_only_open_mpis_launcher_gives_a_rank_a_group_of_its_own(parent, leads, monkeypatch):
    """With srun, the first rank of a node leads a group of all its ranks."""
    monkeypatch.setattr(job.os, "getpgrp", os.getpid)
    monkeypatch.setattr(job, "name_and_parent", lambda process: (parent, 1))
    assert job.leads_its_processes() is leads


def test_a_parent_that_cannot_be_seen(monkeypatch):
    def gone(process):
        raise FileNotFoundError

    monkeypatch.setattr(job.os, "getpgrp", os.getpid)
    monkeypatch.setattr(job, "name_and_parent", gone)
    assert not job.leads_its_processes()


def test_the_name_and_the_parent_of_a_process():
    name, parent = job.name_and_parent(os.getpid())
    assert name
    assert parent == os.getppid()
