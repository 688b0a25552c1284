"""Files, links, messages and variables in the documentation, compared with the code."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mn_comm.building_blocks import STRATEGIES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)
TEXTS = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("packages/*/README.md"))]
LINK = re.compile(r"(?<!\!)\[[^\]\n]*(?:\n[^\]\n]*)?\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(`{3,}).*?^\1`*$", re.M | re.S)


def name(path):
    return str(path.relative_to(ROOT))


def without_code(page):
    return FENCE.sub("", page.read_text())


def slug(heading):
    """Return the anchor that GitHub and Sphinx give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def anchors(page):
    return {slug(heading.replace("`", "")) for heading in re.findall(r"^#+ (.+)$", without_code(page), re.M)}


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_links_lead_somewhere(page):
    for link in LINK.findall(without_code(page)):
        if re.match(r"https?://", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_table_of_communicators_has_all_strategies():
    table = re.findall(r"^\| `(\w+)` \|", (DOCS / "choosing.md").read_text(), re.M)
    assert sorted(table) == sorted(STRATEGIES)


def test_every_page_is_led_to():
    inside = {target.resolve() for page in PAGES for target in toctree(page)}
    assert {page for page in PAGES if page.name != "index.md" or page.parent != DOCS} == inside


def toctree(page):
    for block in re.findall(r"^```\{toctree\}\n(.*?)^```$", page.read_text(), re.M | re.S):
        for entry in re.findall(r"^(?!:)(\S+)$", block, re.M):
            yield from page.parent.glob(f"{entry}.md")


def test_pictures_are_what_the_script_draws(tmp_path):
    code = f"import sys; sys.path[0] = {str(DOCS / 'pictures')!r}; import draw\n"
    code += "for each in draw.PICTURES: open(each.__name__ + '.svg', 'w').write(each().svg())"
    subprocess.run([sys.executable, "-B", "-c", code], cwd=tmp_path, check=True)
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert drawn == {path.name: path.read_text() for path in (DOCS / "pictures").glob("*.svg")}


def test_every_variable_is_described_and_exists():
    sources = "\n".join(path.read_text() for path in ROOT.glob("packages/*/src/**/*.py"))
    ours = r"\b(?:CHAINERMN|MN)_[A-Z_]{3,}\b"
    table = re.findall(rf"^\| `({ours})` \|", (DOCS / "environment.md").read_text(), re.M)
    assert sorted(table) == sorted(set(re.findall(ours, sources)))


def raised():
    """Return the texts of all exceptions and warnings of the packages, with an ellipsis for inserted values."""
    for path in ROOT.glob("packages/*/src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                for argument in node.args[:2]:  # the ranks that warn come before the text
                    yield from texts(argument)
            elif isinstance(node, (ast.Assign, ast.Return)):
                yield from texts(node.value)


def texts(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)


def documented():
    """Return our messages that have an entry; those on the page system.md come from other libraries."""
    pages = [page for page in (DOCS / "troubleshooting").glob("*.md") if page.stem != "system"]
    return [message for page in pages for message in re.findall(r"^###? `(.+)`$", page.read_text(), re.M)]


def stands_for(pattern, text):
    """Return whether a pattern, in which an ellipsis matches anything, begins like a text."""
    return re.match(".*".join(map(re.escape, pattern.split("…"))), text, re.S)


def test_messages_are_those_that_are_raised():
    known = [text for text in raised() if len(text) > 10]
    messages = documented()
    assert len(messages) > 40
    for message in messages:
        assert any(stands_for(text, message) or stands_for(message, text) for text in known), message


def test_code_is_not_wider_than_its_column():
    for page in PAGES:
        for block in re.findall(r"^```(?:python|console)\n(.*?)^```$", page.read_text(), re.M | re.S):
            assert max(map(len, block.splitlines())) <= 88, f"{name(page)}: {max(block.splitlines(), key=len)}"


def test_job_for_kubernetes_is_complete():
    job = yaml.safe_load((DOCS / "kubernetes" / "mpijob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    spec = job["spec"]
    assert spec["mpiImplementation"] in {"OpenMPI", "Intel", "MPICH"}
    assert spec["launcherCreationPolicy"] in {"AtStartup", "WaitForWorkersReady"}
    assert spec["runPolicy"]["cleanPodPolicy"] in {"None", "Running", "All"}
    launcher, worker = (spec["mpiReplicaSpecs"][role] for role in ("Launcher", "Worker"))
    assert launcher["replicas"] == 1
    command = launcher["template"]["spec"]["containers"][0]["args"]
    assert int(command[command.index("-n") + 1]) == worker["replicas"] * spec["slotsPerWorker"]
    for role in (launcher, worker):
        pod = role["template"]["spec"]
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        for container in pod["containers"]:
            assert {"name", "image", "command", "resources"} <= set(container)
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes


def test_image_for_kubernetes_copies_what_there_is():
    dockerfile = (DOCS / "kubernetes" / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (?:--\S+ )*(\S+) ", dockerfile, re.M)
    assert copied
    for source in copied:
        assert source == "dist" or (ROOT / source).exists(), source  # dist contains the results of `build`


@pytest.mark.parametrize("path", sorted((DOCS / "slurm").glob("*.sbatch")), ids=name)
def test_script_for_slurm_is_one_of_bash(path):
    subprocess.run(["bash", "-n", path], check=True)
    assert re.search(r"^srun --mpi=(pmix|pmi2) ", path.read_text(), re.M)
