"""Files that cannot be read, the error as a whole, and the clusters that are shipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mtppp.cluster import load
from mtppp.cluster.loading import MAX_BYTES
from mtppp.errors import ConfigurationError

EXAMPLES = Path(__file__).parents[3] / "cluster_configs"
Problems = Callable[[str | bytes], list[str]]
Text = Callable[..., str]


def failure(path: Path) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        load(path)
    assert caught.value.exit_status == 2
    assert caught.value.__cause__ is None
    return caught.value


def test_no_file(in_directory: Path) -> None:
    error = failure(Path("cluster.yaml"))
    assert error.message == "cluster.yaml: no such file"
    assert error.hint == "name a cluster file, or go to a directory that has a cluster.yaml"


def test_a_directory(in_directory: Path) -> None:
    Path("configs").mkdir()
    error = failure(Path("configs"))
    assert error.message == "configs: is a directory"
    assert error.hint == "name the file in it, such as configs/cluster.yaml"


def test_a_file_below_a_file(in_directory: Path) -> None:
    Path("x").touch()
    assert (
        failure(Path("x/cluster.yaml")).message == "x/cluster.yaml: cannot be read: Not a directory"
    )


@pytest.mark.parametrize("text", ["", "\n", "# only a comment\n", "---\n...\n", "null\n"])
def test_an_empty_file(in_directory: Path, text: str) -> None:
    Path("cluster.yaml").write_text(text, encoding="utf-8")
    error = failure(Path("cluster.yaml"))
    assert error.message == "cluster.yaml: the file is empty"
    assert error.hint == "it needs at least name, model, nodes and runtime"


def test_not_utf8(in_directory: Path) -> None:
    Path("cluster.yaml").write_bytes("name: x\n# größe\n".encode("latin-1"))
    assert failure(Path("cluster.yaml")).message == "cluster.yaml:2: not UTF-8 text"


def test_utf16(problems: Problems, cluster_text: Text) -> None:
    assert problems(cluster_text().encode("utf-16")) == ["cluster.yaml:1: not UTF-8 text"]


def test_a_byte_order_mark_is_no_part_of_the_first_key(
    problems: Problems, cluster_text: Text
) -> None:
    assert problems(cluster_text().encode("utf-8-sig")) == []


def test_too_large(problems: Problems) -> None:
    assert problems(b"#" * (MAX_BYTES + 1)) == ["cluster.yaml: larger than 256 KiB"]


def test_binary(problems: Problems) -> None:
    assert problems(b"\x7fELF\x00\x00") == [
        "cluster.yaml:1: the character U+007F cannot be in the file"
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("- a\n- b\n", "cluster.yaml:1: must be a mapping; is a list"),
        ("\njust words\n", 'cluster.yaml:2: must be a mapping; is the text "just words"'),
        ("5\n", "cluster.yaml:1: must be a mapping; is 5"),
    ],
)
def test_no_mapping_at_the_top(problems: Problems, text: str, line: str) -> None:
    assert problems(text) == [line]


def test_a_syntax_error_is_told_alone(problems: Problems) -> None:
    assert problems("name: X!\nnodes: [\n") == [
        "cluster.yaml:3: not valid YAML: expected the node content, but found '<stream end>'"
    ]


def test_all_at_once_in_the_order_of_the_file(in_directory: Path) -> None:
    Path("cluster.yaml").write_text(
        """\
name: GLM
nodes:
  - {host: a, adress: 10.0.0.1, address: 10.0.0.1, gpus: 8}
  - {host: b, address: 10.0.0.1, gpus: 8}
  - *b
runtime:
  vllm: 0.32
  vllm: "0.32.0"
  python: python3
parallel: {tensor: 8, pipeline: 2, layer_partition: [78]}
serve: {prot: 8000}
""",
        encoding="utf-8",
    )
    error = failure(Path("cluster.yaml"))
    assert error.message == "cluster.yaml has 9 problems"
    assert error.hint == "mend what is named above and run the command again; nothing was started"
    assert [line.removeprefix("cluster.yaml:") for line in error.details] == [
        '1: name: must be at most 40 of the characters a-z, 0-9, "." and "-", the first a letter '
        'or a digit; is the text "GLM"',
        "1: model: required, and not in the file",
        '3: nodes[0].adress: unknown key; did you mean "address"?',
        "5: nodes[2]: aliases are not read; write out what *b stands for",
        "7: runtime.vllm: must be text; write it in quotes; is 0.32",
        "8: runtime.vllm: the key is already on line 7; remove one of the two",
        '9: runtime.python: must be the path of a Python that begins with "/" or "~/", the home '
        'directory on the node; is the text "python3"',
        "10: parallel.layer_partition: must have one number for each of the 2 stages that "
        "parallel.pipeline asks for; has 1",
        '11: serve.prot: unknown key; did you mean "port"?',
    ]


def test_an_unknown_key_hides_no_comparison(problems: Problems, cluster_text: Text) -> None:
    nodes = "nodes: [{host: a, address: 10.0.0.1, gpu: 8, gpus: 8}, {host: 10.0.0.1, gpus: 8}]"
    assert problems(cluster_text("parallel: {tensor: 32, x: 1}", nodes=nodes)) == [
        'cluster.yaml:3: nodes[0].gpu: unknown key; did you mean "gpus"?',
        "cluster.yaml:3: nodes[1].address: the same as nodes[0].address: 10.0.0.1",
        "cluster.yaml:5: parallel.x: unknown key; there are tensor, pipeline, layer_partition",
    ]


def test_a_refused_value_is_not_told_again(problems: Problems, cluster_text: Text) -> None:
    assert problems(cluster_text(name='name: "x\\0"', model="model: *m")) == [
        "cluster.yaml:1: name: must not contain control characters",
        "cluster.yaml:2: model: aliases are not read; write out what *m stands for",
    ]


def test_a_file_that_only_the_reader_refuses_is_refused(
    problems: Problems, cluster_text: Text
) -> None:
    assert problems(cluster_text(name="name: &n demo")) == [
        "cluster.yaml:1: name: anchors are not read; remove &n"
    ]


def test_one_problem_is_one_problem(in_directory: Path, cluster_text: Text) -> None:
    Path("cluster.yaml").write_text(cluster_text("x: 1"), encoding="utf-8")
    assert failure(Path("cluster.yaml")).message == "cluster.yaml has 1 problem"


def test_a_hundred_problems_are_cut_short(in_directory: Path, cluster_text: Text) -> None:
    keys = (f"x{i}: 1" for i in range(100))
    Path("cluster.yaml").write_text(cluster_text(*keys), encoding="utf-8")
    error = failure(Path("cluster.yaml"))
    assert error.message == "cluster.yaml has 100 problems"
    assert len(error.details) == 51
    assert error.details[-1] == "and 50 more"


def test_the_file_is_called_as_the_operator_called_it(tmp_path: Path, cluster_text: Text) -> None:
    path = tmp_path / "my cluster.yml"
    path.write_text(cluster_text("x: 1"), encoding="utf-8")
    assert failure(path).details[0].startswith(f"{path}:5: x: ")


def test_without_a_home_directory(
    problems: Problems, cluster_text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert problems(cluster_text()) == []
    assert problems(cluster_text("ssh: {identity_file: ~/k}")) == [
        "cluster.yaml:5: ssh.identity_file: must not begin with ~: the home directory is not known"
    ]


def test_where_a_value_stands(in_directory: Path, cluster_text: Text) -> None:
    Path("cluster.yaml").write_text(cluster_text("serve:", "  port: 1"), encoding="utf-8")
    _, source = load(Path("cluster.yaml"))
    assert source.locate(("serve", "port")) == "cluster.yaml:6: serve.port"
    assert source.locate(("serve", "stall_timeout")) == "cluster.yaml:5: serve.stall_timeout"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_examples_are_valid(path: Path) -> None:
    cluster, _ = load(path)
    assert cluster.name == path.stem


def test_the_local_demo() -> None:
    cluster, _ = load(EXAMPLES / "local-demo.yaml")
    assert cluster.model.id == str(EXAMPLES / "models/demo-glm4-moe")
    assert [(node.address, node.transport, node.gpus) for node in cluster.nodes] == [
        ("127.0.1.1", "local", 1),
        ("127.0.1.2", "local", 1),
    ]
    assert (cluster.parallel.pipeline, cluster.speculative and cluster.speculative.tokens) == (2, 3)
    assert cluster.serve.args == {"max-model-len": 1024, "max-num-seqs": 8, "dtype": "float32"}
