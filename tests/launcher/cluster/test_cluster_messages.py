"""What the operator reads: exact lines for what can be wrong with a file.

A file is the valid one of conftest with sections replaced; name, model, nodes and runtime are on
lines 1 to 4, what a case adds begins on line 5.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

Problems = Callable[[str], list[str]]

TWO_NODES = "nodes: [{host: a, address: 10.0.0.1, gpus: 8}, %s]"
LOCAL = "{{host: h{0}, address: 127.0.1.{0}, transport: local, gpus: 1}}"
RUNTIME = 'runtime: {vllm: "0.32.0", python: /p, %s}'

UNKNOWN_KEYS = [
    (
        {"nodes": TWO_NODES % "{host: b, adress: 10.0.0.2, address: 10.0.0.2, gpus: 8}"},
        (),
        ['3: nodes[1].adress: unknown key; did you mean "address"?'],
    ),
    ({}, ("modle: x",), ['5: modle: unknown key; did you mean "model"?']),
    (
        {"model": "model: {id: o/m, served-name: x}"},
        (),
        ['2: model.served-name: unknown key; did you mean "served_name"?'],
    ),
    ({}, ("SERVE: {}",), ['5: SERVE: unknown key; did you mean "serve"?']),
    ({}, ("user: x",), ["5: user: unknown key here; there is ssh.user and nodes[].user"]),
    (
        {"nodes": TWO_NODES % "{host: b, name: b, address: 10.0.0.2, gpus: 8}"},
        (),
        ["3: nodes[1].name: unknown key here; there is name at the top level"],
    ),
    ({}, ("port: 8000",), ["5: port: unknown key: set serve.port"]),
    (
        {},
        ("parallel: {pipeline-parallel-size: 2}",),
        ["5: parallel.pipeline-parallel-size: unknown key: set parallel.pipeline"],
    ),
    (
        {},
        ("ssh: {key: k, key_file: k}",),
        [
            '5: ssh.key: unknown key; did you mean "identity_file"?',
            '5: ssh.key_file: unknown key; did you mean "identity_file"?',
        ],
    ),
    (
        {},
        ("serve: {max-model-len: 1}",),
        ["5: serve.max-model-len: unknown key; flags of vllm serve go under serve.args"],
    ),
    (
        {"runtime": RUNTIME % "image: x"},
        (),
        [
            "4: runtime.image: unknown key; there are vllm, environment, python, lock, wheelhouse, "
            "device, env"
        ],
    ),
    (
        {},
        ('"": 1', "zzz:"),
        [
            '5: [""]: unknown key; there are name, model, ssh, gpus_per_node, gpu_type, nodes, '
            "runtime, parallel, speculative, ray, serve, invariants, verify, at_own_risk, "
            "recovery, protect, secrets",
            "6: zzz: unknown key; there are name, model, ssh, gpus_per_node, gpu_type, nodes, "
            "runtime, parallel, speculative, ray, serve, invariants, verify, at_own_risk, "
            "recovery, protect, secrets",
        ],
    ),
]

NAME = (
    'must be at most 40 of the characters a-z, 0-9, "." and "-", the first a letter or a digit; is '
)
HUB_ID = 'must be a hub id such as "org/name", or a path that begins with /, ./, ../ or ~/; is '
HOST = "must be a host name, an IP address or a name from the ssh configuration; is "
PYTHON = (
    'must be the path of a Python that begins with "/" or "~/", the home directory on the node; is '
)

VALUES = [
    ({"name": "name: GLM"}, (), [f'1: name: {NAME}the text "GLM"']),
    ({"name": "name: -a"}, (), [f'1: name: {NAME}the text "-a"']),
    ({"name": "name: a/b"}, (), [f'1: name: {NAME}the text "a/b"']),
    ({"name": f"name: {'a' * 41}"}, (), [f'1: name: {NAME}the text "{"a" * 41}"']),
    ({"name": 'name: "a\\n"'}, (), [f'1: name: {NAME}the text "a\\n"']),
    ({"name": "name: 5"}, (), ["1: name: must be text; write it in quotes; is 5"]),
    ({}, ("protect: maybe",), ['5: protect: must be true or false; is the text "maybe"']),
    ({"name": "name: [a]"}, (), ["1: name: must be text; is a list"]),
    ({"name": "name:"}, (), ["1: name: required, and not in the file"]),
    ({"model": "model: org/model"}, (), ['2: model: must be a mapping; is the text "org/model"']),
    ({"model": "model: {}"}, (), ["2: model.id: required, and not in the file"]),
    ({"model": "model: {id: glm}"}, (), [f'2: model.id: {HUB_ID}the text "glm"']),
    ({"model": "model: {id: a/b/c}"}, (), [f'2: model.id: {HUB_ID}the text "a/b/c"']),
    ({"model": "model: {id: a--b/c}"}, (), [f'2: model.id: {HUB_ID}the text "a--b/c"']),
    ({"model": "model: {id: ~root/m}"}, (), [f'2: model.id: {HUB_ID}the text "~root/m"']),
    (
        {"model": "model: {id: /}"},
        (),
        ["2: model.served_name: required, because model.id has no last part to take it from"],
    ),
    (
        {"model": "model: {id: /m, revision: main}"},
        (),
        ["2: model.revision: a model that is a path has no revision; remove it"],
    ),
    (
        {"model": "model: {id: o/m, revision: --x}"},
        (),
        ['2: model.revision: must be a branch, a tag or a commit; is the text "--x"'],
    ),
    (
        {"model": "model: {id: o/m, served_name: -x}"},
        (),
        [
            "2: model.served_name: must be a name without spaces that does not begin with a dash; "
            'is the text "-x"'
        ],
    ),
    (
        {"model": "model: {id: o/m, config: ~bob/x}"},
        (),
        ['2: model.config: must begin with "/" or "~/", or be relative; is the text "~bob/x"'],
    ),
    ({"model": "model: {id: o/m, config: 5}"}, (), ["2: model.config: must be text; is 5"]),
    ({"nodes": "nodes: []"}, (), ["3: nodes: must not be empty"]),
    ({"nodes": "nodes: 10.0.0.1"}, (), ['3: nodes: must be a list; is the text "10.0.0.1"']),
    ({"nodes": "nodes: [5]"}, (), ["3: nodes[0]: must be a mapping; is 5"]),
    (
        {"nodes": "nodes: [{}]"},
        (),
        [
            "3: nodes[0].host: required, and not in the file",
            "3: nodes[0].gpus: required, and not in the file",
        ],
    ),
    (
        {"nodes": "nodes: [{host: bob@h, address: 10.0.0.1, gpus: 1}]"},
        (),
        ['3: nodes[0].host: must be a host alone; put the text "bob" under user'],
    ),
    (
        {"nodes": "nodes: [{host: -oProxyCommand=x, address: 10.0.0.1, gpus: 1}]"},
        (),
        [f'3: nodes[0].host: {HOST}the text "-oProxyCommand=x"'],
    ),
    (
        {"nodes": "nodes: [{host: h, gpus: 1}]"},
        (),
        ["3: nodes[0].address: required, because host is not an IP address"],
    ),
    (
        {"nodes": "nodes: [{host: h, address: eth0, gpus: 1}]"},
        (),
        ['3: nodes[0].address: must be an IP address; is the text "eth0"'],
    ),
    (
        {"nodes": "nodes: [{host: h, address: 10.0.0.01, gpus: 1}]"},
        (),
        ['3: nodes[0].address: must be an IP address; is the text "10.0.0.01"'],
    ),
    (
        {"nodes": 'nodes: [{host: h, address: "fe80::1%eth0", gpus: 1}]'},
        (),
        ["3: nodes[0].address: must be an address without a zone such as %eth0"],
    ),
    (
        {"nodes": "nodes: [{host: h, address: 0.0.0.0, gpus: 1}]"},
        (),
        ['3: nodes[0].address: must be the address of one host; is the text "0.0.0.0"'],
    ),
    (
        {"nodes": "nodes: [{host: h, address: 224.0.0.1, gpus: 1}]"},
        (),
        ['3: nodes[0].address: must be the address of one host; is the text "224.0.0.1"'],
    ),
    (
        {"nodes": "nodes: [{host: h, address: 255.255.255.255, gpus: 1}]"},
        (),
        ['3: nodes[0].address: must be the address of one host; is the text "255.255.255.255"'],
    ),
    (
        {"nodes": "nodes: [{host: 10.0.0.1, gpus: 0}]"},
        (),
        ["3: nodes[0].gpus: must be at least 1; is 0"],
    ),
    (
        {"nodes": 'nodes: [{host: 10.0.0.1, gpus: "8"}]'},
        (),
        ['3: nodes[0].gpus: must be a whole number; is the text "8"'],
    ),
    (
        {"nodes": "nodes: [{host: 10.0.0.1, gpus: true}]"},
        (),
        ["3: nodes[0].gpus: must be a whole number; is true"],
    ),
    (
        {"nodes": "nodes: [{host: 10.0.0.1, gpus: 8.0}]"},
        (),
        ["3: nodes[0].gpus: must be a whole number; is 8.0"],
    ),
    (
        {"nodes": "nodes: [{host: 10.0.0.1, gpus: 1, transport: loacl}]"},
        (),
        ['3: nodes[0].transport: must be ssh or local; is the text "loacl"; did you mean "local"?'],
    ),
    (
        {
            "nodes": "nodes: [{host: h, address: 127.0.1.1, gpus: 1, transport: local, "
            "user: u, port: 22, identity_file: k}]"
        },
        (),
        [
            "3: nodes[0].user: has no meaning with transport: local; remove it",
            "3: nodes[0].port: has no meaning with transport: local; remove it",
            "3: nodes[0].identity_file: has no meaning with transport: local; remove it",
        ],
    ),
    (
        {"nodes": "nodes: [{host: 10.0.0.1, gpus: 1, user: -x, port: 65536}]"},
        (),
        [
            '3: nodes[0].user: must be the name of a user on the node; is the text "-x"',
            "3: nodes[0].port: must be at most 65535; is 65536",
        ],
    ),
    (
        {"nodes": "nodes: [a@b@10.0.0.1]"},
        ("gpus_per_node: 8",),
        [],
    ),
    (
        {"nodes": "nodes: [10.0.0.1]"},
        ("gpus_per_node: 0",),
        ["5: gpus_per_node: must be at least 1; is 0"],
    ),
    ({"nodes": "nodes: [10.0.0.1]"}, (), ["3: nodes[0].gpus: required, and not in the file"]),
    (
        {"runtime": "runtime: {vllm: 0.32, python: /p}"},
        (),
        ["4: runtime.vllm: must be text; write it in quotes; is 0.32"],
    ),
    (
        {"runtime": 'runtime: {vllm: ">=0.32.0", python: /p}'},
        (),
        ['4: runtime.vllm: must be one release such as "0.32.0"; is the text ">=0.32.0"'],
    ),
    (
        {"runtime": 'runtime: {vllm: "0.32.0", python: bin/python}'},
        (),
        [f'4: runtime.python: {PYTHON}the text "bin/python"'],
    ),
    (
        {"runtime": 'runtime: {vllm: "0.32.0", python: /opt/vllm/}'},
        (),
        [f'4: runtime.python: {PYTHON}the text "/opt/vllm/"'],
    ),
    (
        {"runtime": 'runtime: {vllm: "0.32.0"}'},
        (),
        ["4: runtime.python: required, unless environment is managed"],
    ),
    (
        {"runtime": RUNTIME % "wheelhouse: /srv/wheels"},
        (),
        [
            "4: runtime.wheelhouse: belongs to environment: managed; add that or remove this",
        ],
    ),
    (
        {"runtime": 'runtime: {vllm: "0.32.0", environment: managed, wheelhouse: wheels}'},
        (),
        [
            '4: runtime.wheelhouse: must be an absolute path on the nodes; is the text "wheels"',
        ],
    ),
    (
        {"runtime": RUNTIME % "device: gpu"},
        (),
        ['4: runtime.device: must be cuda or cpu; is the text "gpu"; did you mean "cpu"?'],
    ),
    ({"runtime": RUNTIME % "env: [A]"}, (), ["4: runtime.env: must be a mapping; is a list"]),
    (
        {"runtime": RUNTIME % "env: {A: true, B: 0.9, C: , D: [x], a-b: x, 1X: x}"},
        (),
        [
            "4: runtime.env.A: must be text; write it in quotes, exactly as vLLM is to see it",
            "4: runtime.env.B: must be text; write it in quotes, exactly as vLLM is to see it",
            "4: runtime.env.C: must be text; is empty",
            "4: runtime.env.D: must be text; is a list",
            "4: runtime.env.a-b: not a variable name: letters, digits and _ only",
            "4: runtime.env.1X: not a variable name: letters, digits and _ only",
        ],
    ),
    (
        {},
        ("parallel: {tensor: 0, pipeline: 2}",),
        ["5: parallel.tensor: must be at least 1; is 0"],
    ),
    (
        {},
        ("parallel: {tensor: 8, pipeline: 3}",),
        ["5: parallel: tensor 8 times pipeline 3 needs 24 GPUs; the nodes have 16"],
    ),
    (
        {},
        ("parallel:", "  pipeline: 2", "  layer_partition: [42, 36, 1]"),
        [
            "7: parallel.layer_partition: must have one number for each of the 2 stages that "
            "parallel.pipeline asks for; has 3"
        ],
    ),
    (
        {},
        ("parallel:", "  pipeline: 3", "  layer_partition:", "  - 0", '  - "4"', "  - true"),
        [
            "8: parallel.layer_partition[0]: must be a whole number of at least 1; is 0",
            '9: parallel.layer_partition[1]: must be a whole number of at least 1; is the text "4"',
            "10: parallel.layer_partition[2]: must be a whole number of at least 1; is true",
        ],
    ),
    (
        {},
        ("parallel: {layer_partition: even}",),
        [
            "5: parallel.layer_partition: must be auto, or a list of the layers of each stage; "
            'is the text "even"'
        ],
    ),
    ({}, ("speculative: {}",), ["5: speculative.tokens: required, and not in the file"]),
    (
        {},
        ("speculative: {method: eagle, tokens: 17}",),
        [
            '5: speculative.method: must be mtp; is the text "eagle"',
            "5: speculative.tokens: must be at most 16; is 17",
        ],
    ),
    ({}, ("speculative: mtp",), ['5: speculative: must be a mapping; is the text "mtp"']),
    ({}, ("serve: {port: 0}",), ["5: serve.port: must be at least 1; is 0"]),
    ({}, ("serve: {args: [x]}",), ["5: serve.args: must be a mapping; is a list"]),
    ({}, ("serve: {stall_timeout: 0}",), ["5: serve.stall_timeout: must be at least 1; is 0"]),
    ({}, ("ray: {base_port: 80}",), ["5: ray.base_port: must be at least 1024; is 80"]),
    ({}, ("ray: {base_port: 65437}",), ["5: ray.base_port: must be at most 65436; is 65437"]),
    (
        {},
        ("ray: {object_store_memory: 1000}",),
        ["5: ray.object_store_memory: must be at least 78643200; is 1000"],
    ),
    (
        {},
        ("serve: {port: 26399}",),
        ["5: serve.port: ports 26300 to 26399, from ray.base_port on, are Ray's; is 26399"],
    ),
    (
        {},  # serve.port is 8000 without being in the file
        ("ray: {base_port: 7950}",),
        ["1: serve.port: ports 7950 to 8049, from ray.base_port on, are Ray's; is 8000"],
    ),
    (
        {"nodes": f"nodes: [{', '.join(LOCAL.format(i) for i in (1, 2))}]"},
        ("serve: {port: 26499}",),
        ["5: serve.port: ports 26300 to 26499, from ray.base_port on, are Ray's; is 26499"],
    ),
    (
        {"nodes": f"nodes: [{', '.join(LOCAL.format(i) for i in (1, 2))}]"},
        ("ray: {base_port: 65400}",),
        ["5: ray.base_port: the local nodes' ports would end at 65599, above 65535"],
    ),
    ({}, ("ssh: {connect_timeout: 0}",), ["5: ssh.connect_timeout: must be at least 1; is 0"]),
    (
        {},
        ("ssh: {proxy_jump: -oProxyCommand=x}",),
        [
            "5: ssh.proxy_jump: must be none, or one or several [user@]host[:port] with commas "
            'between them; is the text "-oProxyCommand=x"'
        ],
    ),
    ({}, ('ssh: {identity_file: ""}',), ["5: ssh.identity_file: must be a path; is empty"]),
    ({}, ("secrets: HF_TOKEN",), ['5: secrets: must be a list; is the text "HF_TOKEN"']),
]

BETWEEN_NODES = [
    (
        ("{host: a, address: 10.0.0.1}", "{host: A, address: 10.0.0.2}"),
        ["4: nodes[1].host: the same as nodes[0].host: A"],
    ),
    (
        ("{host: a, address: 10.0.0.1}", "{host: 10.0.0.1}"),
        ["4: nodes[1].address: the same as nodes[0].address: 10.0.0.1"],
    ),
    (
        ('{host: a, address: "2001:DB8:0::1"}', '{host: b, address: "2001:db8::1"}'),
        ["4: nodes[1].address: the same as nodes[0].address: 2001:db8::1"],
    ),
    (
        ("{host: a, address: 10.0.0.1}",) * 3,
        [
            "4: nodes[1].host: the same as nodes[0].host: a",
            "4: nodes[1].address: the same as nodes[0].address: 10.0.0.1",
            "5: nodes[2].host: the same as nodes[0].host: a",
            "5: nodes[2].address: the same as nodes[0].address: 10.0.0.1",
        ],
    ),
    (
        ("{host: a, address: 10.0.0.1}", "{host: b, address: 127.0.1.1, transport: local}"),
        [
            "4: nodes[1].address: 127.0.1.1 is a loopback address, which the other hosts cannot "
            "reach"
        ],
    ),
    (("{host: a, address: 127.0.1.1}", "{host: b, address: 127.0.1.2}"), []),
]


def expect(lines: list[str]) -> list[str]:
    return [f"cluster.yaml:{line}" for line in lines]


@pytest.mark.parametrize(("sections", "extra", "lines"), [*UNKNOWN_KEYS, *VALUES])
def test_one_file(
    problems: Problems,
    cluster_text: Callable[..., str],
    sections: dict[str, str],
    extra: tuple[str, ...],
    lines: list[str],
) -> None:
    assert problems(cluster_text(*extra, **sections)) == expect(lines)


@pytest.mark.parametrize(("nodes", "lines"), BETWEEN_NODES)
def test_between_nodes(problems: Problems, nodes: tuple[str, ...], lines: list[str]) -> None:
    listed = "\n".join(["nodes:", *(f"- {node}" for node in nodes)])
    text = "\n".join(["gpus_per_node: 1", listed, "name: x", "model: {id: o/m}"])
    runtime = 'runtime: {vllm: "0.32.0", python: /p}'
    assert problems(f"{text}\n{runtime}\n") == expect(lines)
