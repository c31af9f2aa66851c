"""What a run leaves behind for programs: `result.json` and `junit.xml`. docs/verify.md has the
fields of both."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from mtppp import __version__
from mtppp.errors import MtpppError
from mtppp.verify.tiers import ALPHA
from mtppp.verify.verdict import Evidence, Verdict, as_dict

SCHEMA = 1


def result(
    verdict: Verdict,
    evidence: Evidence,
    *,
    identities: Mapping[str, Any],
    prompts: Mapping[str, Any],
    worst: list[Any],
    seconds: float,
    date: str,
) -> dict[str, Any]:
    """The content of `result.json`."""
    control, directions = evidence.control, evidence.directions
    return {
        "schema": SCHEMA,
        "mtppp": __version__,
        "date": date,
        "seconds": round(seconds, 1),
        "tier": {
            "name": evidence.tier.name,
            "token_margin": evidence.tier.token_margin,
            "request_margin": evidence.tier.request_margin,
        },
        "alpha": ALPHA,
        "threshold_nats": evidence.above,
        **as_dict(verdict),
        "control": control
        and {
            "damaged": [
                {"share": share, "made": made, "seen": control.seen[share]}
                for share, made in control.made.items()
            ],
            "fails": control.fails,
            "ruined": {"made": control.ruined_made, "seen": control.ruined_seen},
        },
        "formats": dict(zip(("candidate", "baseline"), evidence.formats, strict=True)),
        "known": evidence.known and dict(zip(("right", "asked"), evidence.known, strict=True)),
        "sampled": evidence.sampled and {"tokens": evidence.sampled.tokens},
        "directions": directions
        and {
            name: {
                "tokens": getattr(directions, name).tokens,
                "outliers": getattr(directions, name).outliers,
            }
            for name in ("base_cand", "cand_cand", "cand_base", "base_base")
        },
        "worst": worst,
        "prompts": dict(prompts),
        "identity": dict(identities),
    }


def write(directory: Path, content: Mapping[str, Any]) -> list[str]:
    """Write both files; their paths."""
    text = json.dumps(content, indent=1) + "\n"
    try:
        (directory / "result.json").write_text(text, encoding="utf-8")
        junit(content).write(directory / "junit.xml", encoding="utf-8", xml_declaration=True)
    except OSError as error:
        raise MtpppError(f"{directory}: {error.strerror}") from None
    names = ("result.json", "junit.xml", "record.jsonl")
    return [str(directory / name) for name in names if (directory / name).exists()]


def junit(content: Mapping[str, Any]) -> ElementTree.ElementTree[ElementTree.Element]:
    """One case for the text, one for the drafts. FAIL is a failure, INCONCLUSIVE an error."""
    suite = ElementTree.Element(
        "testsuite",
        name=f"mtppp verify {content['tier']['name']}",
        timestamp=content["date"],
        time=str(content["seconds"]),
    )
    text = ElementTree.SubElement(suite, "testcase", classname="mtppp.verify", name="text")
    why = "; ".join(content["why"])
    failures = errors = skipped = 0
    if content["verdict"] == "FAIL":
        failures += 1
        message = f"{content['cause']}: {why}" if content["cause"] else why
        ElementTree.SubElement(text, "failure", message=message)
    if content["verdict"] == "INCONCLUSIVE":
        errors += 1
        ElementTree.SubElement(text, "error", message=why)
    drafts = ElementTree.SubElement(suite, "testcase", classname="mtppp.verify", name="drafts")
    acceptance = content["acceptance"]
    if acceptance["verdict"] == "LOW":
        failures += 1
        ElementTree.SubElement(drafts, "failure", message=acceptance["why"])
    if acceptance["verdict"] == "NOT JUDGED":
        skipped += 1
        ElementTree.SubElement(drafts, "skipped", message=acceptance["why"])
    if content["warnings"]:
        ElementTree.SubElement(text, "system-out").text = "\n".join(
            f"warning: {warning}" for warning in content["warnings"]
        )
    for name, count in (("tests", 2), ("failures", failures), ("errors", errors)):
        suite.set(name, str(count))
    suite.set("skipped", str(skipped))
    return ElementTree.ElementTree(suite)
