"""Names with special meaning to a shell or Slurm: scripts run, and no part of a name is executed."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ext.cli import main
from megatron_ext.config.load import load_config
from megatron_ext.config.schema import DataConfig, RunConfig
from megatron_ext.launch import slurm
from megatron_ext.launch.array import write_array
from megatron_ext.launch.job import Job, copy_code, write_job
from megatron_ext.launch.resources import Resources
from megatron_ext.utils.errors import UserError

RESOURCES = Resources(nodes=1, processes_per_node=1, job_name="run")

CANARY = "canary"
NAMES = [
    "a b  c",
    "it's",
    'say "x"',
    f"$(touch {CANARY})",
    f"`touch {CANARY}`",
    f"a;touch {CANARY};b",
    f"a' ; touch {CANARY} ; '",
    f'a" ; touch {CANARY} ; "',
    f"a|touch {CANARY}",
    f"&touch {CANARY}&",
    f">{CANARY}",
    "$HOME ${PATH} $$",
    "*?[a-z]{a,b}",
    "~",
    "!!",
    "# comment",
    "%j %A_%a %% 100%",
    "-rf",
    "--output=x",
    "Wörter 文 👩‍👩‍👧",
    "a,b",
]
FOLDERS = ["/".join(NAMES), "-rf", "~", "--output=x"]
"""Nested hostile names, so that few scripts suffice, and names that matter at the beginning of a relative path."""

PYTHON = f"""#!/bin/sh
[ "$3" = train ] || exit 0
folder=$(dirname "$0")
for word in "$@"; do printf '%s\\0' "$word"; done >"$folder/called"
printf '%s' "$PYTHONPATH" >"$folder/path"
printf '%s' "$SELECTRON_ERROR_FILE" >"$folder/error_file"
[ ! -e {CANARY} ]
"""
SRUN = '#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nSLURM_PROCID=0 SLURM_LOCALID=0 exec "$@"\n'
SCONTROL = "#!/bin/sh\necho node1\n"


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_code(tmp_path_factory.mktemp("shared") / "code")


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def environment(folder: Path, **more: str) -> dict[str, str]:
    given = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SELECTRON"))}
    return given | {"PATH": f"{folder}:{os.environ['PATH']}"} | more


def bash(script: Path, cwd: Path, given: dict[str, str]) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)
    done = subprocess.run(["bash", str(script)], cwd=cwd, env=given, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def check(job: Job, called: Path, tmp_path: Path) -> None:
    words = (called / "called").read_text().split("\0")
    assert words[:4] == ["-m", "megatron_ext.cli", "train", f"{job.folder}/config.yaml"]
    assert (called / "path").read_text().split(":")[0] == f"{job.folder}/code"
    assert not list(tmp_path.rglob(CANARY))


@pytest.mark.parametrize("name", FOLDERS, ids=["all", *FOLDERS[1:]])
def test_a_job_in_a_folder_of_that_name(tmp_path, monkeypatch, code, name):
    """Ranks get their arguments unchanged, with a fake Slurm and without Slurm."""
    cwd, python = tmp_path / "cwd" / name, program(tmp_path / "bin" / name / "python", PYTHON)
    cwd.mkdir(parents=True)
    monkeypatch.chdir(cwd)
    config = RunConfig(data=DataConfig(path=name))
    resources = replace(RESOURCES, preflight=["--node-timeout", "5"])
    job = write_job(config, Path("runs") / name / "run", resources, str(python), code=code)
    assert job.folder == cwd / "runs" / name / "run" / "launch" / "1"
    bash(job.script, cwd, environment(tmp_path / "none"))
    check(job, python.parent, tmp_path)
    for tool, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        program(tmp_path / "tools" / tool, text)
    bash(
        job.script,
        cwd,
        environment(
            tmp_path / "tools", SLURM_JOB_ID="7", SLURM_JOB_NODELIST="node1", SLURM_NTASKS="1", SLURM_JOB_NUM_NODES="1"
        ),
    )
    check(job, python.parent, tmp_path)
    assert (python.parent / "error_file").read_text() == f"{job.folder}/error-7-0"
    array = write_array(Path("runs") / name, [job], RESOURCES, parallel=None, after=None)
    bash(array.script, cwd, environment(tmp_path / "none", SLURM_ARRAY_TASK_ID="0", SLURM_ARRAY_JOB_ID="40"))
    assert job.log.name == "job-40_0.log"
    check(job, python.parent, tmp_path)


def cut_as_slurm_does(line: str) -> list[str]:
    """Split an #SBATCH line by the rules of sbatch's `_get_argument`: a backslash escapes within quotes, too."""
    words, word, quote, escaped = [], "", "", False
    for letter in line:
        if escaped:
            word, escaped = word + letter, False
        elif letter == "\\":
            escaped = True
        elif quote:
            quote, word = ("", word) if letter == quote else (quote, word + letter)
        elif letter in "'\"":
            quote = letter
        elif letter == "#":
            break
        elif letter.isspace():
            words, word = [*words, word], ""
        else:
            word += letter
    return [one for one in [*words, word] if one]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_directives_round_trip(name):
    options = [f"--comment={name}", f"--output=/x/{name}/job-%j.log", "--requeue"]
    lines = slurm.directives(options)
    assert [cut_as_slurm_does(line.removeprefix("#SBATCH ")) for line in lines] == [[option] for option in options]


@pytest.mark.parametrize("letter", ["\n", "\r", "\x00", "\x1b", "\u2028", "\x85", "\udcff"], ids=ascii)
def test_control_characters_are_refused(tmp_path, monkeypatch, capsys, letter):
    """The error names the field or option, and nothing is written."""
    name = f"a{letter}touch {CANARY}"
    (tmp_path / "c.yaml").write_text("data: {path: x}\n")
    for override in (f"run.dir={name!a}".replace("'", '"'), f"data.path={name!a}".replace("'", '"')):
        if letter not in "\x00\udcff":  # YAML cannot contain these
            with pytest.raises(UserError, match=rf"^{override.partition('=')[0]}: .* contains the control character "):
                load_config(tmp_path / "c.yaml", [override], {})
    with pytest.raises(UserError, match=r"^--sbatch: .* contains the control character "):
        slurm.directives([f"--comment={name}"])
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ["prepare", "--input", "x", "--output", name, "--tokenizer", "t"],
        ["prepare", "--input", name, "--output", "x", "--tokenizer", "t"],
        ["report", name, "--output", "x"],
        ["train", name],
        ["launch", "c.yaml", "--partition", name],
        ["status", name],
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert "contains the control character" in error
        assert error.count("\n") == 1
        assert error.rstrip("\n").isprintable()
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


@pytest.mark.parametrize(
    ("cwd", "name", "problem"),
    [
        ("a\\b", "runs", "the working folder: .* contains a backslash, which Slurm drops"),
        (".", "r\\s", r"run\.dir: .* contains a backslash, which Slurm drops"),
        (".", "r:s", r"run\.dir: .* contains a colon, which separates the entries of PYTHONPATH"),
    ],
)
def test_paths_that_no_script_can_contain(tmp_path, monkeypatch, code, cwd, name, problem):
    (tmp_path / cwd).mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / cwd)
    runs = tmp_path / name
    with pytest.raises(UserError, match=problem):
        write_job(RunConfig(data=DataConfig(path="x")), runs / "run", RESOURCES, "python", code=code)
    assert not runs.exists()


@pytest.mark.parametrize(("cwd", "name"), [(".", "a,b"), ("a,b", "runs"), ("a:b", "runs")])
def test_mounts_of_a_container_are_lists(tmp_path, monkeypatch, code, cwd, name):
    (tmp_path / cwd).mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / cwd)
    resources = replace(RESOURCES, container="docker://image")
    with pytest.raises(UserError, match="contains a comma or a colon, which separate the container's mounts"):
        write_job(RunConfig(data=DataConfig(path="x")), tmp_path / name / "run", resources, "python", code=code)
    assert not (tmp_path / name).exists()
