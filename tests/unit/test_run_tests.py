"""Running the tests: which run beside which, in which order, how they are counted, and what is left out."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools"


@pytest.fixture(scope="module")
def tools():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        import outcomes
        import run_tests
        import scheduling

        yield {"outcomes": outcomes, "run_tests": run_tests, "scheduling": scheduling}


@pytest.fixture
def scheduling(tools):
    return tools["scheduling"]


@pytest.fixture
def run_tests(tools):
    return tools["run_tests"]


@pytest.fixture
def task(scheduling, tmp_path):
    def make(name, seconds=1.0, load=1.0, command=(), failed=False, **options):
        cost = scheduling.Cost(seconds, load, failed)
        options["needs"] = frozenset(options.get("needs", ()))
        return scheduling.Task(name, command, tmp_path / "logs" / name, cost=cost, **{"cores": load, **options})

    return make


def start_all(schedule):
    return [task.name for task in iter(schedule.start, None)]


def test_the_longest_first_and_before_it_what_failed(scheduling, task):
    tasks = [task("short", 1), task("long", 9), task("middle", 5), task("failed", 2, failed=True)]
    schedule = scheduling.Schedule(tasks, 1)
    order = []
    while (one := schedule.start()) is not None:
        order.append(one.name)
        schedule.end(one, succeeded=True)
    assert order == ["failed", "long", "middle", "short"]


def test_what_waits_runs_beside_what_computes(scheduling, task):
    schedule = scheduling.Schedule([task("job", 9, 2), task("a", 5, 0.2), task("b", 4, 0.2), task("c", 3, 0.2)], 2)
    assert start_all(schedule) == ["job", "a", "b"]
    schedule.end(schedule.running[1], succeeded=True)
    assert start_all(schedule) == ["c"]


def test_one_large_job_at_a_time_and_it_does_not_wait_for_all_small_tasks(scheduling, task):
    tasks = [task(f"small{i}", 9 - i, 0.5) for i in range(6)]
    schedule = scheduling.Schedule([task("job2", 2, 2), task("job4", 3, 4), *tasks], 2)
    assert start_all(schedule) == ["job4", "small0"]
    (job, small) = schedule.running
    schedule.end(job, succeeded=True)
    assert start_all(schedule) == ["job2"]
    schedule.end(small, succeeded=True)
    assert start_all(schedule) == ["small1"]


def test_a_large_job_that_does_not_fit_keeps_later_ones_from_starting(scheduling, task):
    tasks = [task("early", 9, 0.9), task("other", 9, 0.9), task("after", 1, 2, needs=["early"]), task("late", 1, 0.4)]
    schedule = scheduling.Schedule(tasks, 2)
    assert start_all(schedule) == ["early", "other", "late"]
    early, other, _ = schedule.running
    schedule.waiting.append(task("later", 1, 0.1))
    schedule.end(early, succeeded=True)
    assert start_all(schedule) == []
    schedule.end(other, succeeded=True)
    assert start_all(schedule) == ["after", "later"]


def test_idle_cores_take_more_than_the_record_allows(scheduling, task):
    idle = [0.2, 0.4, 0.0, 0.4, 0.0]
    tasks = [task(name, 9, 0.9) for name in "abcdef"]
    schedule = scheduling.Schedule([*tasks, task("job", 1, 2)], 2, lambda: idle.pop(0))
    assert start_all(schedule) == ["job"]
    assert start_all(schedule) == ["a"]
    schedule.end(schedule.running[0], succeeded=True)
    assert start_all(schedule) == ["b", "c"]
    assert idle == []


def test_how_many_cores_are_idle(scheduling, tmp_path, monkeypatch):
    now = [10.0]
    monkeypatch.setattr(scheduling.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(scheduling.os, "cpu_count", lambda: 4)
    file = tmp_path / "stat"
    file.write_text("cpu 100 0 0 1000 50 0 0 0 0 0\ncpu0 1 2 3 4\n")
    idle = scheduling.IdleCores(file)
    file.write_text("cpu 150 0 50 1070 80 0 0 0 0 0\ncpu0 1 2 3 4\n")
    assert idle() == 0  # too soon
    now[0] += 2
    assert idle() == pytest.approx(2.0)
    file.unlink()
    now[0] += 2
    assert idle() <= 0


def test_a_machine_with_one_core_runs_everything(scheduling, task):
    schedule = scheduling.Schedule([task("job", 5, 4), task("a", 3, 2.0), task("b")], 1)
    order = []
    while schedule.waiting:
        started = start_all(schedule)
        assert started
        order += started
        for one in list(schedule.running):
            schedule.end(one, succeeded=True)
    assert sorted(order) == ["a", "b", "job"]


def test_tasks_wait_for_what_they_need_and_are_lost_with_it(scheduling, task):
    tasks = [task("env", 1), task("a", needs=["env"]), task("b", needs=["a"]), task("other", 0.5)]
    schedule = scheduling.Schedule(tasks, 2)
    assert start_all(schedule) == ["env", "other"]
    assert [one.name for one in schedule.end(schedule.running[0], succeeded=False)] == ["a", "b"]
    schedule.end(schedule.running[0], succeeded=True)
    assert not schedule.waiting and schedule.start() is None


def test_what_much_depends_on_comes_first(scheduling, task):
    tasks = [task("env1", 1), task("env2", 1), task("x", 30, needs=["env2"]), task("check", 20)]
    assert start_all(scheduling.Schedule(tasks, 1))[:1] == ["env2"]


def test_the_time_that_is_left(scheduling, task):
    schedule = scheduling.Schedule([task("a", 10, 1), task("b", 10, 1), task("c", 10, 0.5)], 2)
    assert schedule.seconds_left() == pytest.approx(12.5)
    assert scheduling.Schedule([task("a", 30, 0.1)], 2).seconds_left() == 30
    # Beside others, it took 20 s, but computed for only 10 s.
    assert scheduling.Schedule([task("a", 20, 0.5, cores=4), task("b", 20, 0.5)], 1).seconds_left() == 20


def test_a_record_is_kept_and_an_unreadable_one_ignored(scheduling, tmp_path):
    file, cost, other = tmp_path / "new" / "record.json", scheduling.Cost(3.0, 0.5, True), scheduling.Cost(1.0, 1.0)
    scheduling.Record(file).keep("a", cost)
    record = scheduling.Record(file)
    assert (record.estimate("a", other), record.estimate("b", other)) == (cost, other)
    record = scheduling.Record(tmp_path / "another", file)  # what was kept elsewhere
    record.keep("b", other)
    assert (record.estimate("a", other), record.estimate("b", cost)) == (cost, other)
    assert scheduling.Record(tmp_path / "another").estimate("a", other) == other
    for text in ("{", "[]", '{"a": 1}', '{"a": [1, 2, 3, 4]}'):
        file.write_text(text)
        assert scheduling.Record(file).estimate("a", other) == other


def run(scheduling, tasks, scratch):
    ended = {}

    def note(one):
        ended[one.task.name] = one
        return one.status == 0

    scheduling.run_all(scheduling.Schedule(tasks, 2), note, lambda schedule: None, scratch)
    return ended


def test_running(scheduling, task, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint('busy')"
    print_folder = "import os, tempfile; print(os.environ['MINE'], tempfile.mkdtemp(), flush=True)"
    tasks = [
        task("busy", command=[sys.executable, "-c", busy]),
        task("fails", command=[sys.executable, "-c", "raise SystemExit(3)"]),
        task("lost", command=["never"], needs=["fails"]),
        task("folder", command=[sys.executable, "-c", print_folder], environ={"MINE": "yes"}),
        task("stays", command=[sys.executable, "-c", "import time; time.sleep(60)"], limit=0.2),
    ]
    ended = run(scheduling, tasks, scratch)
    assert {name: one.status for name, one in ended.items()} == {
        **{"busy": 0, "fails": 3, "lost": None, "folder": 0},
        **{"stays": scheduling.HUNG},
    }
    assert ended["busy"].cost.load * ended["busy"].cost.seconds == pytest.approx(0.3, rel=0.9)
    assert "did not end within 0.2 s" in tasks[4].log.read_text()
    mine, folder = tasks[3].log.read_text().split()
    assert mine == "yes" and Path(folder).parents[1] == scratch
    assert [ended[name].cost.failed for name in ("busy", "fails")] == [False, True]


SUITE = {
    "unit/test_a.py": "def test_one(): pass\ndef test_two(): pass",
    "jobs/test_b.py": "def test_job(): pass",
    "jobs/inner/test_c.py": "import pytest\n@pytest.mark.skip\ndef test_job(): pass",
    "mpi/test_d.py": "import pytest\npytestmark = pytest.mark.sizes(1, 4)\ndef test_rank(): pass",
    "mpi/test_e.py": "# pytest.mark.sizes(3)\ndef test_rank(): pass",
    "jobs/test_f.py": "import pytest\npytestmark = pytest.mark.rest\ndef test_job(): pass",
}


@pytest.fixture
def suite(tmp_path):
    for name, text in SUITE.items():
        file = tmp_path / "suite" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "suite"


def plan(run_tests, scheduling, tests, tmp_path, **options):
    record = scheduling.Record(tmp_path / "record")
    described = run_tests.Suite("x", str(tests), sys.executable, **options)
    return {one.task.name: one.task for one in run_tests.plan_suite(described, tmp_path / "reports", record)}


def test_every_file_is_in_one_task_of_each_part(run_tests, scheduling, suite, tmp_path):
    tasks = plan(run_tests, scheduling, suite, tmp_path)
    sizes = {f"x mpi, {size}": ["test_d.py", "test_e.py"] for size in ("1 rank", "2 ranks", "3 ranks", "4 ranks")}
    assert {name: files_in(task) for name, task in tasks.items()} == {
        **{"x unit": ["test_a.py"], "x jobs/test_b": ["test_b.py"], "x jobs/test_c": ["test_c.py"]},
        "x jobs/test_f": ["test_f.py"],
        **sizes,
    }
    assert len({task.log for task in tasks.values()}) == len(tasks)


def files_in(task):
    return [Path(one).name for one in task.command if one.endswith(".py")]


def test_the_quick_share_and_the_rest_together_are_all(run_tests, scheduling, suite, tmp_path):
    quick = plan(run_tests, scheduling, suite, tmp_path, share="quick")
    rest = plan(run_tests, scheduling, suite, tmp_path, share="rest")
    assert {name: files_in(task) for name, task in quick.items()} == {
        **{"x unit": ["test_a.py"], "x jobs/test_b": ["test_b.py"], "x jobs/test_c": ["test_c.py"]},
        "x mpi, 1 rank, quick": ["test_d.py"],
        "x mpi, 2 ranks": ["test_d.py", "test_e.py"],
        "x mpi, 4 ranks, quick": ["test_d.py"],
    }
    assert {name: files_in(task) for name, task in rest.items()} == {
        "x jobs/test_f": ["test_f.py"],
        "x mpi, 1 rank, rest": ["test_e.py"],
        "x mpi, 3 ranks, rest": ["test_d.py", "test_e.py"],
        "x mpi, 4 ranks, rest": ["test_e.py"],
    }


def test_long_units_run_file_by_file(run_tests, scheduling, suite, tmp_path):
    scheduling.Record(tmp_path / "record").keep("x unit", scheduling.Cost(45.0, 0.9))
    assert list(plan(run_tests, scheduling, suite, tmp_path, parts=["unit"])) == ["x unit/test_a"]


def test_on_a_busy_machine_nothing_seems_to_compute(run_tests, scheduling, suite, tmp_path):
    record = scheduling.Record(tmp_path / "record")
    for name in ("x unit", "x jobs/test_c"):
        record.keep(name, scheduling.Cost(100.0, 0.01))
    tasks = plan(run_tests, scheduling, suite, tmp_path, parts=["unit", "jobs"])
    loads = {name: task.cores for name, task in tasks.items()}
    assert loads == {"x unit": 1.0, "x jobs/test_b": 0.7, "x jobs/test_c": 0.5, "x jobs/test_f": 0.7}


def test_the_folder_of_one_part(run_tests, scheduling, suite, tmp_path):
    tasks = plan(run_tests, scheduling, suite / "mpi", tmp_path, ranks=[2])
    assert {name: files_in(task) for name, task in tasks.items()} == {"x mpi, 2 ranks": ["test_d.py", "test_e.py"]}


def test_one_file(run_tests, scheduling, suite, tmp_path):
    tasks = plan(run_tests, scheduling, suite / "mpi" / "test_e.py", tmp_path, ranks=[3])
    assert [(name, files_in(task)) for name, task in tasks.items()] == [("x mpi, 3 ranks", ["test_e.py"])]


@pytest.fixture
def call(tmp_path):
    def call(*arguments):
        command = [sys.executable, TOOLS / "run_tests.py", f"--record={tmp_path}/record", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=70)

    return call


def test_the_command_counts_and_says_what_failed(call, suite, tmp_path):
    suite.joinpath("unit", "test_bad.py").write_text("def test_wrong():\n    print('here')\n    assert 1 == 2")
    done = call(suite, "--parts=unit,jobs", f"--reports={tmp_path}/reports")
    assert done.returncode == 1, done.stdout + done.stderr
    assert (tmp_path / "reports" / "counts").read_text() == "4 1 1\n"
    text = done.stdout
    assert "assert 1 == 2" in text and re.search(r"^Failed:\n  .*::test_wrong$", text, re.MULTILINE)
    assert text.index("Failed:") < text.index("The slowest:") < text.index("4 passed, 1 failed, 1 skipped in")
    assert "test_one PASSED" not in text and "\033" not in text


def test_a_choice_that_selects_nothing_is_no_failure(call, suite):
    done = call(suite, "--parts=unit,jobs", "-k", "nowhere")
    assert done.returncode == 0 and "0 passed, 0 failed" in done.stdout
    suite.joinpath("unit", "test_a.py").write_text("")
    assert call(suite, "--parts=unit").returncode == 1


def test_a_plan_with_several_suites(call, suite, tmp_path):
    one = {"name": "one", "tests": str(suite), "python": sys.executable, "parts": ["unit"], "reports": "one"}
    two = {**one, "name": "two", "reports": "two", "needs": ["fails"]}
    three = {**one, "name": "three", "reports": "three", "needs": ["works"]}
    commands = [
        {"name": "fails", "command": [sys.executable, "-c", "raise SystemExit('no such package')"], "first": True},
        {"name": "works", "command": [sys.executable, "-c", ""], "first": True},
    ]
    tmp_path.joinpath("plan").write_text(
        json.dumps({"title": "all", "suites": [one, two, three], "commands": commands})
    )
    done = call(f"--plan={tmp_path}/plan", f"--reports={tmp_path}/reports")
    assert done.returncode == 1
    assert "no such package" in done.stdout and "two unit was not run: what it needs has failed" in done.stdout
    assert (tmp_path / "reports" / "counts").read_text() == "4 2 0\n"


def test_the_marks_stand_where_the_tool_finds_them(run_tests):
    """A mark on one test only, which pytest would accept, has no effect."""
    for file in [*ROOT.glob("tests/*/**/test_*.py"), *ROOT.glob("packages/*/tests/**/test_*.py")]:
        text = file.read_text()
        if file != Path(__file__).resolve() and re.search(r"mark\.(rest|sizes)\b", text):
            assert re.search(r"^pytestmark = .*mark\.(rest|sizes)|^    pytest\.mark\.(rest|sizes)", text, re.MULTILINE)
            assert all(1 <= size <= 4 for size in run_tests.marked_sizes(file)), file


def test_the_sessions_together_run_everything(run_tests, scheduling, tmp_path):
    """`-s test` and `-s rest` together run the tests of `-s full`, and those of all packages are among them."""
    code = f"""
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("noxfile", {str(ROOT / "noxfile.py")!r})
noxfile = importlib.util.module_from_spec(spec)
spec.loader.exec_module(noxfile)
print(json.dumps([noxfile.quick_suites(), noxfile.other_suites(), noxfile.all_suites(), noxfile.SUITES]))
"""
    *plans, suites = json.loads(subprocess.check_output([sys.executable, "-c", code], text=True))
    record = scheduling.Record(tmp_path / "record")
    quick, other, everything = (
        {
            run
            for entry in entries
            for run in runs_of(run_tests, run_tests.Suite(**entry | {"tests": str(ROOT / entry["tests"])}), record)
        }
        for entries in plans
    )
    assert quick & other == set() and quick | other == everything
    for suite in suites:
        parts = {"jobs", "unit"} if suite == "product" else {"unit"}
        assert {Path(file).parent.name for name, _, file in quick if name == suite} >= parts


def runs_of(run_tests, suite, record):
    """Return which files a suite runs on how many ranks."""
    for one in run_tests.plan_suite(suite, ROOT, record):
        size = re.search(r"mpi, (\d)", one.task.name)
        for file in one.task.command:
            if Path(file).name.startswith("test_") and file.endswith(".py"):
                yield suite.name, size and size[1], file
