"""What is exported, as text: a block of shell for every node, or a SLURM batch script."""

from __future__ import annotations

import ipaddress
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from mtppp.exporter.commands import WITHOUT, NodeCommand
from mtppp.plan.plan import Plan

_WIDTH = 96
_NODE_RANK = '"$RANK"'


def shell_script(
    plan: Plan, nodes: Sequence[NodeCommand], plugins: str, notes: Sequence[str]
) -> str:
    """One block for each node, to be run there in any order.

    Args:
        plugins: the directory of the plugins on every node.
        notes: more to say at the head.
    """
    lines = [*_head(plan, notes, "Run each block on its node, as the same user; in any order.")]
    for node in nodes:
        lines += ["", *_comment([f"---- {node.host} ({node.address}) ----"])]
        lines += ["(", *_indent(_block(plan, node, plugins, nodes[0].address)), ")"]
    return "\n".join(lines) + "\n"


def slurm_script(
    plan: Plan, nodes: Sequence[NodeCommand], plugins: str, gpus: int, notes: Sequence[str]
) -> str:
    """A batch script with one task per node.

    Args:
        gpus: of every node.
    """
    hosts = len(nodes)
    placement = (
        "SLURM chooses and orders the nodes: the first of them has stage 0 and the API server. "
        "`nodes` of the cluster file is not heeded."
    )
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={plan.name}",
        f"#SBATCH --nodes={hosts}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={gpus}",
        "#SBATCH --exclusive",
        *_head(plan, [placement, *notes], "Submit with: IFACE=ib0 sbatch THIS_FILE", plain=True),
        "set -euo pipefail",
        "# The network interface between the nodes: ip -br addr",
        ': "${IFACE:?set IFACE to the interface between the nodes}"',
        *_required(plan.secrets),
        "",
        "# The script that every node runs; its rank is its place in the allocation.",
        "run=$(cat <<'NODE'",
        "set -euo pipefail",
        "RANK=$SLURM_NODEID",
        *_block(plan, nodes[0], plugins, None),
        "NODE",
        ")",
        # awk reads to the end: with pipefail, `head` would make its writer's SIGPIPE an error.
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | awk "NR == 1")',
        'MASTER=$(srun --nodes=1 --ntasks=1 --nodelist="$head" \\',
        """  ip -o addr show dev "$IFACE" scope global | awk 'NR == 1 {print $4}')""",
        "export MASTER=${MASTER%/*} IFACE",
        'srun --kill-on-bad-exit=1 bash -c "$run"',
    ]
    return "\n".join(lines) + "\n"


def _head(plan: Plan, notes: Sequence[str], how: str, *, plain: bool = False) -> Iterator[str]:
    if not plain:
        yield "#!/bin/bash"
    layers = "/".join(map(str, plan.layer_partition))
    drafts = f", MTP k={plan.draft_tokens}" if plan.draft_tokens else ""
    yield from _comment(
        [
            f"{plan.name}: {plan.model} on vLLM {plan.vllm}, TP{plan.tensor} x PP{plan.pipeline}, "
            f"layers {layers}{drafts}. Made by `mtppp export`.",
            how,
            "",
            "What is missing without mtppp:",
            *(f"- {line}" for line in (*WITHOUT, *notes)),
            "",
            *_plugins(plan),
        ]
    )


def _plugins(plan: Plan) -> Iterator[str]:
    needed = [name for name in plan.patches if name not in ("attest", "placement")]
    what = f"the patches {', '.join(needed)}" if needed else "no patch, but the checks of its ranks"
    yield (
        f"vLLM loads {what} from the directory PLUGINS. Make it with `mtppp export --plugins DIR` "
        "and copy it to the same path on every node. Without it on PYTHONPATH vLLM starts all the "
        "same" + (", and is wrong." if needed else ".")
    )


def _block(plan: Plan, node: NodeCommand, plugins: str, master: str | None) -> Iterator[str]:
    """The commands of one node; without `master` it is found out when they run."""
    if master is not None:
        yield from _required(plan.secrets)
        yield f"RANK={node.index} MASTER={shlex.quote(master)} ADDRESS={shlex.quote(node.address)}"
        yield from _interface(node.address)
    else:
        yield "ADDRESS=$(ip -o addr show dev \"$IFACE\" scope global | awk 'NR == 1 {print $4}')"
        yield "ADDRESS=${ADDRESS%/*}"
    yield f"PLUGINS={shlex.quote(plugins)}"
    yield 'test -e "$PLUGINS/mtppp_patches" || { echo "no plugins in $PLUGINS" >&2; exit 1; }'
    yield from _run_directory(plan)
    yield "export PYTHONPATH=$PLUGINS VLLM_HOST_IP=$ADDRESS"
    yield 'export GLOO_SOCKET_IFNAME=$IFACE NCCL_SOCKET_IFNAME="=$IFACE"'
    for name, value in node.env.items():
        yield f"export {name}={shlex.quote(value)}"
    yield from _server(node, several=master is None)


def _run_directory(plan: Plan) -> Iterator[str]:
    yield "OWN=/var/tmp/mtppp-$(id -u)"
    yield f"export MTPPP_RUN_DIR=$OWN/{plan.name}-exported/$RANK"
    # Not -m 700, which is for the last directory only: launches refuse one that others can change.
    yield '(umask 077; mkdir -p "$MTPPP_RUN_DIR")'
    # Everybody may write to /var/tmp: somebody else could have made it first, or a link.
    yield (
        'test -d "$OWN" -a ! -L "$OWN" -a -O "$OWN" || '
        '{ echo "$OWN is not a directory of yours: have it removed" >&2; exit 1; }'
    )


def _interface(address: str) -> Iterator[str]:
    """Find the interface that has the address; every loopback address is the loopback's."""
    if ipaddress.ip_address(address).is_loopback:
        yield "IFACE=lo"
        return
    yield (
        """IFACE=$(ip -o addr show | awk -v a="$ADDRESS" """
        """'{split($4, n, "/"); if (n[1] == a) print $2}')"""
    )
    yield ': "${IFACE:?no interface has the address $ADDRESS}"'


def _server(node: NodeCommand, *, several: bool) -> Iterator[str]:
    """`vllm serve`; with `several` the same text serves every node."""
    words = [_word(word) for word in node.argv]
    if "--nnodes" in node.argv:
        words += ["--node-rank", _NODE_RANK, "--master-addr", '"$MASTER"']
        if several:
            yield 'test "$RANK" = 0 && headless=() || headless=(--headless)'
            words.append('"${headless[@]}"')
        elif node.headless:
            words.append("--headless")
    if several and "--host" in words:
        words[words.index("--host") + 1] = '"$ADDRESS"'
    program = words[: words.index("serve") + 2]
    yield f"exec {' '.join(program)} \\"
    yield from _continued(_pairs(words[len(program) :]))


def _word(word: str) -> str:
    # Where python lies in the home directory, the shell must see the tilde.
    return (
        word if word.startswith("~/") and shlex.quote(word[2:]) == word[2:] else shlex.quote(word)
    )


def _pairs(words: Sequence[str]) -> list[str]:
    """A flag and its values on one line."""
    lines: list[str] = []
    for word in words:
        if lines and not word.startswith("--") and word != '"${headless[@]}"':
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _continued(lines: Sequence[str]) -> Iterator[str]:
    for index, line in enumerate(lines):
        yield f"  {line}" + (" \\" if index < len(lines) - 1 else "")


def _required(secrets: Iterable[str]) -> Iterator[str]:
    for name in secrets:
        yield f': "${{{name}:?export {name} first}}"; export {name}'


def _indent(lines: Iterable[str]) -> Iterator[str]:
    yield from (f"  {line}" for line in lines)


def _comment(paragraphs: Iterable[str]) -> Iterator[str]:
    for paragraph in paragraphs:
        follow = "  " if paragraph.startswith("- ") else ""
        wrapped = textwrap.wrap(paragraph, _WIDTH, subsequent_indent=follow, break_on_hyphens=False)
        yield from (f"# {line}".rstrip() for line in wrapped or [""])
